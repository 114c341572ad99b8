"""Key norm: keep the tokens of small keys."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KNorm(Scorer):
    """Keep the keys of small norm: they are the ones later queries attend to.

        s_j = -||k_j||_2

    Norms that agree in half their bits count as equal, so that of equal tokens the newest is evicted: rotation leaves
    their norms equal but for rounding, which depends on the batch size.
    Source: Devoto et al. 2024, arXiv 2406.11430, abstract. Reads keys only, keeps no state: any schedule will do.
    """

    needs = Needs(keys=True, ties=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        norms: Tensor = widen(observation.keys).norm(dim=-1)
        return -norms

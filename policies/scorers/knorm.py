"""Key norm: keep the tokens with small key norms."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KNorm(Scorer):
    """Keep keys with a small norm, because later queries tend to attend to them.

        s_j = -||k_j||_2

    Norms that agree in half their bits count as equal, so that the newest of equal tokens is evicted. Rotation keeps
    their norms equal up to rounding, which depends on the batch size.
    Source: Devoto et al. 2024, arXiv 2406.11430, abstract. Reads only keys and keeps no state, so it works with any
    schedule.
    """

    needs = Needs(keys=True, ties=True, fixed_scores=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        norms: Tensor = widen(observation.keys).norm(dim=-1)
        return -norms

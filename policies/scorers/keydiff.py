"""KeyDiff: keep the keys that are least similar to the others."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Keep the keys that differ most from the mean direction of all stored keys of a head.

        s_j = -cos(k_j, a), a = 1 / T sum_j k_j / ||k_j||_2

    Stored (rotated) keys are used. The scorer reads only keys and keeps no state, so it works with any schedule; the
    paper evicts in blocks.
    Source: Park et al. 2025, arXiv 2504.15364, section 3.
    """

    needs = Needs(keys=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        keys = F.normalize(widen(observation.keys), dim=-1)
        stored = keys if observation.slots.packed else keys.masked_fill(~observation.occupied[..., None], 0.0)
        anchor = F.normalize(stored.sum(2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(-1)

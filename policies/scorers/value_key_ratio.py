"""PagedEviction: keep tokens with large values and small keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class ValueKeyRatio(Scorer):
    """Keep tokens with a large value relative to their key; the first `sinks` and the newest `recent` always stay.

        s_j = ||v_j||_2 / ||k_j||_2

    sinks: number of first tokens that are always kept. recent: number of newest ones. In pages, the pages that hold
    them stay, here the first and the newest page.
    Source: Chitty-Venkata et al. 2025, arXiv 2509.04377 (PagedEviction), section 4.
    """

    needs = Needs(keys=True, fixed_scores=True)

    sinks: int = 1
    recent: int = 1

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)
        whole_number("recent", self.recent, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(self.sinks, self.recent)

    def score(self, observation: Observation, state: State) -> Tensor:
        values, keys = (widen(x).norm(dim=-1) for x in (observation.values, observation.keys))
        found: Tensor = values / keys.clamp(min=torch.finfo(keys.dtype).tiny)
        return found

"""SnapKV: what the observation window at the end attends to, pooled over neighbours."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class SnapKV(AttentionScorer):
    """Keep what the newest `window` queries attend to, smoothed over `kernel` neighbours, and the window itself.

    Attention is summed over the window and averaged over the query heads of a group, then pooled over the candidates
    (everything before the window) in order of position. Window tokens carry their unpooled sums: a value-aware
    wrapper may need them. Source: Li et al. 2024, arXiv 2404.14469, listing 1; window 32 and max-pool 7 are those of
    its LongBench runs.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg", "none"] = "max"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1 query, got {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number of tokens, got {self.kernel}")
        if self.pool not in ("max", "avg", "none"):
            raise ValueError(f"pool must be max, avg or none, got {self.pool!r}")

    @property
    def queries_needed(self) -> int:
        return self.window

    def protects_newest(self, budget: int) -> int:
        return self.window

    def raw(self, observation: Observation, state: State) -> Tensor:
        return observation.window_attention(self.window).sum(-2)

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        candidates = observation.occupied & ~observation.newest(self.window)
        if observation.ascending:
            return self._pooled(raw, candidates)
        order = observation.positions.masked_fill(~observation.occupied, torch.iinfo(torch.int32).max).argsort(-1)
        pooled = self._pooled(raw.gather(-1, order), candidates.gather(-1, order))
        return torch.empty_like(raw).scatter_(-1, order, pooled)

    def _pooled(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """Neighbouring slots pooled among the candidates [B,H_kv,T]; every other slot keeps its own score."""
        if self.pool == "none":
            return scores
        if self.pool == "max":
            among = scores.masked_fill(~candidates, -torch.inf)
            pooled = F.max_pool1d(among, self.kernel, stride=1, padding=self.kernel // 2)
        else:
            among = scores.masked_fill(~candidates, 0.0)
            pooled = F.avg_pool1d(among, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.where(candidates, pooled, scores)

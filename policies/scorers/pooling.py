"""Scores smoothed over neighbours, which keeps what surrounds an important token.

Shapes: B batch, H_kv KV heads, T slots.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.observation import Observation

Pool = Literal["max", "avg", "none"]


def check_kernel(kernel: int) -> None:
    """ValueError unless a kernel has a middle."""
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd number of tokens, got {kernel}")


def by_position(observation: Observation) -> Tensor | None:
    """The slots in order of position, empty ones last: [B,H_kv,T]; None where they already lie so."""
    if observation.ascending:
        return None
    return observation.positions.masked_fill(~observation.occupied, torch.iinfo(torch.int32).max).argsort(-1)


def smooth(scores: Tensor, candidates: Tensor, order: Tensor | None, kernel: int, pool: Pool) -> Tensor:
    """Each candidate's score pooled over `kernel` neighbours among the candidates; other slots keep their own score.

    scores, candidates (bool) and order, the slots as they are read (None: as they lie), are [B,H_kv,T]; candidates must
    come side by side in that order. Beyond their ends max sees nothing, avg zeros that count.
    """
    if order is None:
        return _pooled(scores, candidates, kernel, pool)
    pooled = _pooled(scores.gather(-1, order), candidates.gather(-1, order), kernel, pool)
    return torch.empty_like(scores).scatter_(-1, order, pooled)


def _pooled(scores: Tensor, candidates: Tensor, kernel: int, pool: Pool) -> Tensor:
    if pool == "none":
        return scores
    if pool == "max":
        among = scores.masked_fill(~candidates, -torch.inf)
        pooled = F.max_pool1d(among, kernel, stride=1, padding=kernel // 2)
    else:
        among = scores.masked_fill(~candidates, 0.0)
        pooled = F.avg_pool1d(among, kernel, stride=1, padding=kernel // 2)
    return torch.where(candidates, pooled, scores)

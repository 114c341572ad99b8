"""Pooling of scores over neighbouring tokens, which keeps the context of an important token.

Shapes: B batch, H_kv KV heads, T slots.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors import ConfigError
from kvbench.policies.observation import Observation

Pool = Literal["max", "avg", "none"]


def check_kernel(kernel: int) -> None:
    """Raise ValueError unless a kernel size is odd."""
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError("kernel", kernel, "an odd number of tokens")


def by_position(observation: Observation) -> Tensor | None:
    """The slots in order of position, empty slots at one end: [B,H_kv,T]; None if they are already in order."""
    # Most slots are already in order, so a stable sort takes half the time on a CPU.
    return None if observation.slots.ascending else observation.positions.argsort(dim=-1, stable=True)


def smooth(scores: Tensor, observation: Observation, window: int, kernel: int, pool: Pool) -> Tensor:
    """Each candidate's score [B,H_kv,...,T] pooled over `kernel` neighbours among the candidates, in order of position.

    Candidates are the tokens before the newest `window` tokens. All window tokens must be stored; their scores are not
    pooled. At the ends of the candidates, max ignores missing neighbours and avg counts them as zeros.
    """
    order = None if observation.slots.ascending else by_position(observation)
    return smooth_along(scores, observation, order, window, kernel, pool)


def smooth_along(
    scores: Tensor, observation: Observation, order: Tensor | None, window: int, kernel: int, pool: Pool
) -> Tensor:
    """`smooth` with the slots in the given order [B,H_kv,T], candidates first; None: slots are already in order."""
    candidates = scores.shape[-1] - window
    if pool == "none" or candidates < 1:
        return scores
    if observation.slots.packed:  # every head has the same number of candidates: no masks
        if order is None:
            return torch.cat([_pooled(scores[..., :candidates], kernel, pool), scores[..., candidates:]], dim=-1)
        first = _spread(order, scores)[..., :candidates]
        return scores.scatter(-1, first, _pooled(scores.gather(-1, first), kernel, pool))
    among = _spread(observation.occupied & ~observation.newest(window), scores)
    order = None if order is None else _spread(order, scores)
    outside = -torch.inf if pool == "max" else 0.0
    read = scores.masked_fill(~among, outside)
    pooled = _pooled(read if order is None else read.gather(-1, order), kernel, pool)
    back = pooled if order is None else torch.empty_like(scores).scatter_(-1, order, pooled)
    return torch.where(among, back, scores)


def _spread(x: Tensor, scores: Tensor) -> Tensor:
    """x [B,H_kv,T] with the shape of scores [B,H_kv,...,T]."""
    return x.view(*x.shape[:2], *[1] * (scores.dim() - 3), x.shape[-1]).expand_as(scores)


def _pooled(scores: Tensor, kernel: int, pool: Pool) -> Tensor:
    if pool == "max":
        return F.max_pool1d(scores.flatten(0, -2), kernel, stride=1, padding=kernel // 2).view_as(scores)
    # Same order of additions and same result as `avg_pool1d`, in a third of the time on a CPU.
    slots, wide = scores.shape[-1], F.pad(scores, (kernel // 2, kernel // 2))
    total = wide[..., :slots].clone()
    for shift in range(1, kernel):
        total += wide[..., shift : shift + slots]
    return total.div_(kernel)

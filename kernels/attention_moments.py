"""First and second moments of attention over a call's queries: what RoCo's mean and deviation are made of.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, R of them at once, T slots, D head dim.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, visible, widen

LOG2E = math.log2(math.e)
FEW_QUERIES = 8  # up to here the rows themselves are small
LOGITS_AT_ONCE = 2**21  # 8 MiB of float32 stay in cache between the passes


class Moments(NamedTuple):
    """Per slot, [B,H_kv,T] float32 each: the sum over queries of the group's mean attention, and of its square."""

    sums: Tensor
    squares: Tensor


def attention_moments_ref(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Moments:
    """The definition: all rows at once. Arguments and result as in `attention_moments`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    mean = rows.mean(2)  # [B,H_kv,M,T]
    return Moments(mean.sum(-2), mean.square().sum(-2))


@torch.no_grad()
def attention_moments(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Moments:
    """Moments of the attention each slot drew from the queries of a call, in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    """
    if queries.shape[2] <= FEW_QUERIES:
        return attention_moments_ref(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    transposed = widen(keys).transpose(-1, -2)
    at_once = max(1, LOGITS_AT_ONCE // (batch * query_heads * slots))
    sums, squares = transposed.new_zeros(2, batch, heads, slots)
    for start in range(0, new, at_once):
        positions = query_positions[:, start : start + at_once]
        reached = _reach(positions, key_positions)
        block = widen(queries[:, :, start : start + at_once]) * (scaling if softcap is None else scaling / softcap)
        rows = block.shape[2]
        logits = block.reshape(batch, heads, -1, dim) @ transposed[..., :reached]
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        seen = visible(positions, key_positions[..., :reached], sliding_window)  # [B,H_kv,R,S]
        mean = _group_mean(logits.view(batch, heads, -1, rows, reached), seen)
        sums[..., :reached] += mean.sum(-2)
        squares[..., :reached] += mean.square_().sum(-2)
    return Moments(sums, squares)


def _reach(positions: Tensor, key_positions: Tensor) -> int:
    """How many slots from the first one on hold everything that the queries at positions [B,R] may see."""
    within = (key_positions <= positions.amax(-1)[:, None, None]) & (key_positions >= 0)
    used = within.any(1).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _group_mean(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax of logits [B,H_kv,G,R,S] (overwritten) where seen [B,H_kv,R,S], averaged over G: [B,H_kv,R,S]."""
    group = logits.shape[2]
    logits.masked_fill_(~seen[:, :, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top.masked_fill_(top == -torch.inf, 0.0)).mul_(LOG2E).exp2_()  # exp2: a third of exp on CPUs
    whole = weights.sum(-1, keepdim=True)
    share = torch.where(whole > 0, 1 / (group * whole), 0.0)
    mean = weights[:, :, 0] * share[:, :, 0]
    for head in range(1, group):
        mean.addcmul_(weights[:, :, head], share[:, :, head])
    return mean

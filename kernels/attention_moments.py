"""First and second moments of attention over a call's queries: what RoCo's mean and deviation are made of.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, R of them at once, T slots, D head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, widen
from kvbench.kernels.softmax_blocks import FEW_QUERIES, Attended, softmax_blocks


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
    attended: Attended | None = None,
) -> Moments:
    """Moments of the attention each slot drew from the queries of a call, in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    attended: the attention output is computed from the same rows and written there.
    PyTorch on every device: no Triton kernel exists for it.
    """
    call = (queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    if queries.shape[2] <= FEW_QUERIES and attended is None:
        return attention_moments_ref(*call)
    sums, squares = widen(keys.new_empty(0)).new_zeros(2, *key_positions.shape)
    for reached, weights, inverse in softmax_blocks(*call, attended):
        share = inverse[..., None] / inverse.shape[2]
        mean = weights[:, :, 0].mul_(share[:, :, 0])  # [B,H_kv,R,S], in the block's own buffer
        for head in range(1, inverse.shape[2]):
            mean.addcmul_(weights[:, :, head], share[:, :, head])
        sums[..., reached] += mean.sum(-2)
        squares[..., reached] += mean.square_().sum(-2)
    return Moments(sums, squares)

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""One tile of slots of one KV head, as decode attention takes it: who sees whom, logits, weights, output so far."""

from __future__ import annotations

from typing import NamedTuple

from kvbench.kernels.jit import jit, tl
from kvbench.kernels.prompt_tiles import capped


class Strides(NamedTuple):
    """Of queries, keys, values, positions, new tokens and bias; 0 where slots are flat, and for all that is unread."""

    q_batch: int
    q_head: int
    q_row: int
    q_dim: int
    k_batch: int
    k_head: int
    k_row: int
    k_dim: int
    v_batch: int
    v_head: int
    v_row: int
    v_dim: int
    q_pos_batch: int = 0
    q_pos_row: int = 0
    k_pos_batch: int = 0
    k_pos_head: int = 0
    k_pos_row: int = 0
    new_k_batch: int = 0
    new_k_head: int = 0
    new_k_dim: int = 0
    new_v_batch: int = 0
    new_v_head: int = 0
    new_v_dim: int = 0
    bias_batch: int = 0
    bias_head: int = 0
    bias_row: int = 0


@jit
def tile(
    rows: tl.tensor, there: tl.tensor, stride: tl.tensor, start: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Numbers start.. of the heads at pointers `rows`: [n,BLOCK_D], 0 where there is nothing."""
    dims = start + tl.arange(0, BLOCK_D).to(tl.int64)
    return tl.load(rows[:, None] + dims[None, :] * stride, mask=there[:, None] & (dims < D)[None, :], other=0.0)


@jit
def append_token(
    rows: tl.tensor,
    slot: tl.tensor,
    row_stride: tl.tensor,
    dim_stride: tl.tensor,
    token: tl.tensor,
    token_stride: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """The numbers of a new token, written into its slot where that is one of the slots from `first` up to `end`."""
    dims = tl.arange(0, BLOCK_D)
    there = (dims < D) & (slot + dims * 0 >= first) & (slot + dims * 0 < end)
    numbers = tl.load(token + dims * token_stride, mask=there)
    tl.store(rows + slot * row_stride + dims * dim_stride, numbers, mask=there)


@jit
def attend_tile(
    q: tl.tensor,
    q_rows: tl.tensor,
    q_pos: tl.tensor,
    there: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    logits_at: tl.tensor,
    slots: tl.tensor,
    length: tl.tensor,
    newest: tl.tensor,
    oldest: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    strides: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    PLACED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BIASED: tl.constexpr,
    LOGITS: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output of query rows after the `slots` of one tile; logits are in base 2."""
    wide = slots.to(tl.int64)
    needed = slots < length
    if PLACED:  # what no query of this tile may see is not even read
        k_pos = tl.load(k_pos_ptr + wide * strides.k_pos_row, mask=needed, other=-1).to(tl.int32)
        needed = (k_pos >= 0) & (k_pos <= newest)
        if WINDOWED:
            needed = needed & (k_pos > oldest - window)
    k_rows = k_ptr + wide * strides.k_row
    logits = tl.dot(q, tl.trans(tile(k_rows, needed, strides.k_dim, 0, D, BLOCK_D)), input_precision="ieee")
    for start in tl.static_range(BLOCK_D, WHOLE_D, BLOCK_D):
        more = tl.trans(tile(k_rows, needed, strides.k_dim, start, D, BLOCK_D))
        logits = tl.dot(tile(q_rows, there, strides.q_dim, start, D, BLOCK_D), more, logits, input_precision="ieee")
    logits = capped(logits, scale, cap, CAPPED)
    if BIASED:
        bias = tl.load(bias_ptr + wide * strides.bias_row, mask=needed, other=0.0)
        logits += bias[None, :] * 1.4426950408889634
    seen = needed[None, :]
    if PLACED:
        seen = seen & (k_pos[None, :] <= q_pos[:, None])
        if WINDOWED:
            seen = seen & (k_pos[None, :] > q_pos[:, None] - window)
    logits = tl.where(seen, logits, float("-inf"))
    if LOGITS:
        tl.store(logits_at[:, None] + wide[None, :], logits, mask=there[:, None] & (slots < length)[None, :])
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - shift[:, None])
    rescale = tl.exp2(top - shift)
    v = tile(v_ptr + wide * strides.v_row, needed, strides.v_dim, 0, D_V, BLOCK_V)
    out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    return new_top, total * rescale + tl.sum(weights, 1), out

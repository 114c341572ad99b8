# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""Joins the outputs of the parts into which the slots of a KV head are split, by their log-sum-exp.

Shapes: B batch, H_q query heads, R = B * KV heads, G query heads per KV head, M queries, S parts, D head dim of
queries, D_v of values.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.tiles import View, jit, next_power_of_two, tl


@partial(jit, varying=("T", "each", "parts"))
def _join(
    parts_ptr: tl.tensor, parts_lse_ptr: tl.tensor, counts_ptr: tl.tensor, out_ptr: tl.tensor, lse_ptr: tl.tensor,
    T: tl.tensor, each: tl.tensor, parts: tl.tensor, rotation: View, D_V: tl.constexpr, BLOCK_V: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one query row of one KV head, joined from the parts of the head, times `rotation`, if any."""
    kv_row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    row = tl.program_id(1)
    count = T
    if counts_ptr is not None:
        count = tl.load(counts_ptr + kv_row).to(tl.int32)
    count = tl.cdiv(tl.maximum(count, 1), each)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    dims = tl.arange(0, BLOCK_V)
    out = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, count, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        at = (kv_row * parts + some) * rows + row
        lse = tl.load(parts_lse_ptr + at, mask=some < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        share, fading = tl.exp(lse - shift), tl.exp(top - shift)
        there = (lse > float("-inf"))[:, None] & (dims < D_V)[None, :]  # other parts may not be stored
        part = tl.load(parts_ptr + at[:, None] * D_V + dims[None, :], mask=there, other=0.0)
        out = out * fading + tl.sum(share[:, None] * part, 0)
        total = total * fading + tl.sum(share, 0)
        top = new_top
    whole = tl.where(total > 0, total, 1.0)
    place = kv_row * rows + row
    tl.store(lse_ptr + place + tl.arange(0, 1), tl.where(total > 0, top + tl.log(whole), float("-inf")))
    out = out / whole
    if rotation is None:
        tl.store(out_ptr + place * D_V + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D_V)
    else:
        PART: tl.constexpr = min(BLOCK_V, 32)
        for first in tl.static_range(0, BLOCK_V, PART):
            some = first + tl.arange(0, PART)
            at = rotation.ptr + dims[None, :] * rotation.row + some[:, None] * rotation.dim
            matrix = tl.load(at, mask=(dims < D_V)[None, :] & (some < D_V)[:, None], other=0.0)
            turned = tl.sum(matrix * out[None, :], 1).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + place * D_V + some, turned, mask=some < D_V)


def join(
    part_out: Tensor, part_lse: Tensor, like: Tensor, heads: int, slots: int, each: int, counts: Tensor | None = None,
    rotation: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B,H_q,M,D_v] and natural log-sum-exp [B,H_q,M] from parts [R,S,G*M,D_v] and their log-sum-exp [R,S,G*M].

    like [B,H_q,M,D]: the queries. Part s of a KV head has its slots s * each to (s + 1) * each. The number of slots is
    counts [B,H_kv] or, without counts, `slots`; parts beyond it are not read. A single part is the result. rotation
    [D_v,D_v]: by which the output is multiplied. dtype: of the output, by default that of the queries.
    """
    (batch, query_heads, new), value_dim = like.shape[:3], part_out.shape[-1]
    if part_out.shape[1] == 1 and rotation is None:
        return part_out.view(batch, query_heads, new, value_dim), part_lse.view(batch, query_heads, new)
    out = like.new_empty(batch, query_heads, new, value_dim, dtype=dtype or like.dtype)
    log_sum_exp = like.new_empty(batch, query_heads, new, dtype=torch.float32)
    block = max(16, next_power_of_two(value_dim))
    _join[batch * heads, query_heads // heads * new](
        part_out, part_lse, counts, out, log_sum_exp, slots, each, part_out.shape[1],
        None if rotation is None else View(rotation, 0, 0, *rotation.stride()), D_V=value_dim, BLOCK_V=block,
        AT_ONCE=max(1, 4096 // block),
    )  # fmt: skip
    return out, log_sum_exp

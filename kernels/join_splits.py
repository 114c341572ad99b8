# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention whose slots were shared out over programs, joined; and its logits made the weights that evictions read.

out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s) over a KV head's parts s, and the sink if there is
one; weight = exp(logit - lse). A head's parts lie side by side: equally many of each, or as a work list has them.

Shapes: B batch, H_q query heads, H_kv KV heads, R = B * H_kv, G = H_q / H_kv, M queries, S parts of all heads, T slots,
D_v head dim of values.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import View, jit, next_power_of_two, of_head, tl
from kvbench.kernels.work_list import Work, parts_of, segment

SLOTS_A_PROGRAM = 256  # whose logits become weights


class Parts(NamedTuple):
    """What programs made of their slots: out [S,G*M,D_v], natural log-sum-exp [S,G*M], -inf where nothing was seen.

    programs, tile, slots: of a work list, in tiles of so many slots, of KV heads of `slots` where these are not flat.
    tile 0: every KV head has `programs` parts.
    """

    out: Tensor
    log_sum_exp: Tensor
    programs: int
    tile: int = 0
    slots: int = 0


class Asked(NamedTuple):
    """What is wanted beside the output: logits [B,H_kv,G,M,T] in base 2 become `weights`, in place, or are added to
    sums [B,H_kv,T,G or 1], or [N,G or 1] of flat slots. segments: starts and counts [B,H_kv] of flat slots."""

    logits: Tensor | None = None
    weights: bool = False
    sums: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None


NOTHING = Asked()


class HeadParts(NamedTuple):
    """A KV head's parts as `_finish` reads them: `count` of them from `first` on, each of `width` query rows; sinks."""

    out: tl.tensor
    log_sum_exp: tl.tensor
    sinks: tl.tensor
    first: tl.tensor
    count: tl.tensor
    width: tl.tensor


@jit
def _log_sum_exp(
    parts: HeadParts, rows: tl.tensor, heads: tl.tensor, there: tl.tensor, AT_ONCE: tl.constexpr
) -> tl.tensor:
    """Natural log-sum-exp of query rows [n] of query heads [n]."""
    top = tl.where(there, float("-inf"), float("-inf"))
    if parts.sinks is not None:
        top = tl.load(parts.sinks + heads, mask=there, other=float("-inf")).to(tl.float32)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    for start in range(0, parts.count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        at = parts.log_sum_exp + rows[:, None] + (parts.first + some)[None, :] * parts.width
        lse = tl.load(at, mask=there[:, None] & (some < parts.count)[None, :], other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(lse - shift[:, None]), 1)
        top = new_top
    return top + tl.log(tl.where(total > 0, total, 1.0))


@jit
def _join(
    parts: HeadParts,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    part_row: tl.tensor,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Output and log-sum-exp of one query row, row `part_row` of every part."""
    one = tl.zeros([1], tl.int64)
    lse = tl.max(_log_sum_exp(parts, one + part_row, one + head, one == 0, AT_ONCE), 0)
    tl.store(lse_ptr + row, lse)
    shift = tl.where(lse == float("-inf"), 0.0, lse)
    dims = tl.arange(0, BLOCK_V)
    out = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, parts.count, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        at = (parts.first + some) * parts.width + part_row
        share = tl.exp(tl.load(parts.log_sum_exp + at, mask=some < parts.count, other=float("-inf")) - shift)
        there = (some < parts.count)[:, None] & (dims < D_V)[None, :]
        part = tl.load(parts.out + at[:, None] * D_V + dims[None, :], mask=there, other=0.0)
        out += tl.sum(share[:, None] * part, 0)
    tl.store(out_ptr + row * D_V + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D_V)


@jit
def _weigh(
    parts: HeadParts,
    logits_ptr: tl.tensor,
    sums: View,
    head: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    slots: tl.tensor,
    length: tl.tensor,
    WEIGHTS: tl.constexpr,
    PER_QUERY_HEAD: tl.constexpr,
    BLOCK_G: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """A KV head's logits [G*M,T] at some slots become WEIGHTS, in place, and are added to its sums, if any."""
    heads = tl.arange(0, BLOCK_G)
    drawn = tl.zeros([BLOCK_G, slots.shape[0]], tl.float32)
    there = (heads < G)[:, None] & (slots < length)[None, :]
    for query in range(M):
        rows = heads * M + query
        lse = _log_sum_exp(parts, rows, head * G + heads, heads < G, AT_ONCE)
        shift = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
        at = logits_ptr + rows.to(tl.int64)[:, None] * T + slots[None, :]
        weights = tl.exp2(tl.load(at, mask=there, other=float("-inf")) - shift[:, None])
        if WEIGHTS:
            tl.store(at, weights, mask=(heads < G)[:, None] & (slots < T)[None, :])
        drawn += weights
    if sums is not None:
        at = sums.ptr + slots.to(tl.int64) * sums.row
        if PER_QUERY_HEAD:
            each = at[None, :] + heads[:, None] * sums.dim
            tl.store(each, tl.load(each, mask=there, other=0.0) + drawn, mask=there)
        else:
            before = tl.load(at, mask=slots < length, other=0.0)
            tl.store(at, before + tl.sum(drawn, 0) / G, mask=slots < length)


@partial(jit, varying=("T", "programs", "joined"))
def _finish(
    parts_ptr: tl.tensor,
    parts_lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    programs: tl.tensor,
    joined: tl.tensor,
    WEIGHTS: tl.constexpr,
    PER_QUERY_HEAD: tl.constexpr,
    TILE: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One program of a KV head: one of `joined` query rows to join, or BLOCK_T slots whose logits become weights."""
    kv_row = tl.program_id(0).to(tl.int64)  # of R
    head = kv_row % H_kv
    part = tl.program_id(1)
    first, count = kv_row * programs, programs
    if TILE > 0:
        first, count = parts_of(Work(tl.num_programs(0), T, counts_ptr), kv_row, programs, TILE)
    parts = HeadParts(parts_ptr, parts_lse_ptr, sinks_ptr, first, count, G * M)
    if part < joined:
        row = kv_row * G * M + part
        _join(parts, out_ptr, lse_ptr, row, head * G + part // M, part, D_V, BLOCK_V, AT_ONCE)
    elif logits_ptr is not None:
        slots = (part - joined) * BLOCK_T + tl.arange(0, BLOCK_T)
        start, length = segment(starts_ptr, counts_ptr, kv_row, T)
        own = logits_ptr + kv_row * G * M * T
        drawn = of_head(sums, kv_row, H_kv, start)
        _weigh(parts, own, drawn, head, G, M, T, slots, length, WEIGHTS, PER_QUERY_HEAD, BLOCK_G, AT_ONCE)


def finish(
    parts: Parts, queries: Tensor, heads: int, dtype: torch.dtype, asked: Asked = NOTHING
) -> tuple[Tensor, Tensor]:
    """Output [B,H_q,M,D_v] in `dtype` and log-sum-exp [B,H_q,M] out of parts, for queries [B,H_q,M,D]: one launch."""
    (batch, query_heads, new), value_dim = queries.shape[:3], parts.out.shape[-1]
    group, logits, sums = query_heads // heads, asked.logits, asked.sums
    block_v = max(16, next_power_of_two(value_dim))
    out = queries.new_empty(batch, query_heads, new, value_dim, dtype=dtype)
    log_sum_exp = queries.new_empty(batch, query_heads, new, dtype=torch.float32)
    slots = 0 if logits is None else logits.shape[-1]
    starts, counts = asked.segments or (None, None)
    added = None if sums is None else View(sums, *(0,) * (4 - sums.dim()), *sums.stride())
    _finish[batch * heads, group * new + -(-slots // SLOTS_A_PROGRAM)](
        parts.out, parts.log_sum_exp, asked.sinks, out, log_sum_exp, logits, starts, counts, added,
        heads, group, new, parts.slots, parts.programs, group * new, WEIGHTS=asked.weights,
        PER_QUERY_HEAD=sums is not None and sums.shape[-1] > 1, TILE=parts.tile, D_V=value_dim, BLOCK_V=block_v,
        BLOCK_G=next_power_of_two(group), BLOCK_T=SLOTS_A_PROGRAM, AT_ONCE=max(1, 4096 // block_v),
        maxnreg=128,  # left alone, ptxas takes 40 and spills
    )  # fmt: skip
    return out, log_sum_exp

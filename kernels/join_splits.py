# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention whose slots were split over programs, joined; and its logits made the weights that evictions read.

out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s) over the splits s; weight = exp(logit - lse).

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D_v head dim of values.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.jit import jit, next_power_of_two, tl

SLOTS_A_PROGRAM = 256  # whose logits become weights


@jit
def _log_sum_exp(
    parts_lse_ptr: tl.tensor, rows: tl.tensor, there: tl.tensor, splits: tl.tensor, BLOCK_S: tl.constexpr
) -> tl.tensor:
    """Natural log-sum-exp of query rows [n] out of their splits'."""
    parts = tl.arange(0, BLOCK_S)
    at = parts_lse_ptr + rows[:, None] * splits + parts[None, :]
    lse = tl.load(at, mask=there[:, None] & (parts < splits)[None, :], other=float("-inf"))
    top = tl.max(lse, 1)
    total = tl.sum(tl.exp(lse - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    return top + tl.log(tl.where(total > 0, total, 1.0))


@jit
def _join(
    parts_ptr: tl.tensor,
    parts_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    row: tl.tensor,
    splits: tl.tensor,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Output and log-sum-exp of one query row out of its splits'."""
    only = row + tl.zeros([1], tl.int64)
    lse = tl.max(_log_sum_exp(parts_lse_ptr, only, only >= 0, splits, BLOCK_S), 0)
    tl.store(lse_ptr + row, lse)
    shift = tl.where(lse == float("-inf"), 0.0, lse)
    dims = tl.arange(0, BLOCK_V)
    out = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, splits, AT_ONCE):
        parts = start + tl.arange(0, AT_ONCE)
        at = row * splits + parts
        share = tl.exp(tl.load(parts_lse_ptr + at, mask=parts < splits, other=float("-inf")) - shift)
        there = (parts < splits)[:, None] & (dims < D_V)[None, :]
        part = tl.load(parts_ptr + at[:, None] * D_V + dims[None, :], mask=there, other=0.0)
        out += tl.sum(share[:, None] * part, 0)
    tl.store(out_ptr + row * D_V + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D_V)


@partial(jit, varying=("T", "splits", "joined"))
def _finish(
    parts_ptr: tl.tensor,
    parts_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    sums_batch: tl.tensor,
    sums_head: tl.tensor,
    sums_row: tl.tensor,
    sums_group: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    splits: tl.tensor,
    joined: tl.tensor,
    FLAT: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SUMS: tl.constexpr,
    PER_QUERY_HEAD: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program of a KV head: one of `joined` query rows to join, or BLOCK_T slots whose logits become weights."""
    kv_row = tl.program_id(0).to(tl.int64)  # of B * H_kv
    part = tl.program_id(1)
    if part < joined:
        _join(
            parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, kv_row * G * M + part, splits, D_V, BLOCK_V, BLOCK_S, AT_ONCE
        )  # fmt: skip
    elif WEIGHTS or SUMS:
        slots = (part - joined) * BLOCK_T + tl.arange(0, BLOCK_T)
        length = T
        if FLAT:
            length = tl.load(counts_ptr + kv_row).to(tl.int32)
        heads = tl.arange(0, BLOCK_G)
        drawn = tl.zeros([BLOCK_G, BLOCK_T], tl.float32)
        for query in range(M):
            rows = kv_row * G * M + heads * M + query
            lse = _log_sum_exp(parts_lse_ptr, rows, heads < G, splits, BLOCK_S)
            shift = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
            at = logits_ptr + rows[:, None] * T + slots[None, :]
            there = (heads < G)[:, None] & (slots < length)[None, :]
            weights = tl.exp2(tl.load(at, mask=there, other=float("-inf")) - shift[:, None])
            if WEIGHTS:
                tl.store(at, weights, mask=(heads < G)[:, None] & (slots < T)[None, :])
            drawn += weights
        if SUMS:
            sums_ptr += kv_row // H_kv * sums_batch + kv_row % H_kv * sums_head
            if FLAT:
                sums_ptr += tl.load(starts_ptr + kv_row).to(tl.int64) * sums_row
            at = sums_ptr + slots.to(tl.int64) * sums_row
            if PER_QUERY_HEAD:
                each = at[None, :] + heads[:, None] * sums_group
                there = (heads < G)[:, None] & (slots < length)[None, :]
                tl.store(each, tl.load(each, mask=there, other=0.0) + drawn, mask=there)
            else:
                before = tl.load(at, mask=slots < length, other=0.0)
                tl.store(at, before + tl.sum(drawn, 0) / G, mask=slots < length)


def finish(
    parts: Tensor,
    parts_lse: Tensor,
    logits: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
    heads: int,
    weights: bool,
    sums: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output [B,H_q,M,D_v] in `dtype` and log-sum-exp [B,H_q,M] of parts [B,H_q,M,splits,D_v].

    parts_lse [B,H_q,M,splits]: natural, -inf for a split that saw nothing. logits [B,H_kv,G,M,T] in base 2 become, in
    place, weights where these are wanted, and are added to sums [B,H_kv,T,G or 1], or flat [N,G or 1] where segments =
    starts, counts [B,H_kv] say which of them are whose. No launch where a single split has left nothing to do.
    """
    batch, query_heads, new, splits, value_dim = parts.shape
    if splits == 1:
        out, lse, joined = parts.squeeze(-2), parts_lse.squeeze(-1), 0
    else:
        out = parts.new_empty(batch, query_heads, new, value_dim, dtype=dtype)
        lse, joined = parts_lse.new_empty(batch, query_heads, new), query_heads // heads * new
    slots = 0 if logits is None else logits.shape[-1]
    programs = joined + -(-slots // SLOTS_A_PROGRAM)
    starts, counts = (None, None) if segments is None else segments
    strides = (0,) * 4 if sums is None else (*(0,) * (4 - sums.dim()), *sums.stride())
    if programs:
        block_v, block_s = max(16, next_power_of_two(value_dim)), next_power_of_two(splits)
        _finish[batch * heads, programs](
            parts, parts_lse, out, lse, logits, starts, counts, sums, *strides,
            heads, query_heads // heads, new, slots, splits, joined,
            FLAT=segments is not None, WEIGHTS=weights, SUMS=sums is not None,
            PER_QUERY_HEAD=sums is not None and sums.shape[-1] > 1,
            D_V=value_dim, BLOCK_V=block_v, BLOCK_S=block_s, AT_ONCE=min(block_s, max(1, 4096 // block_v)),
            BLOCK_G=next_power_of_two(query_heads // heads), BLOCK_T=SLOTS_A_PROGRAM,
        )  # fmt: skip
    return out, lse

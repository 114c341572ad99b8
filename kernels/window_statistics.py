# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Statistics of an observation window: what each slot drew from the newest queries, and how unsteadily.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, W queries of the window, T slots, D head dim, R = G W
rows of a KV head. The rows themselves, [B,H_kv,G,W,T], are never in memory on a GPU: the keys are read twice instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows
from kvbench.kernels.jit import View, at_head, jit, next_power_of_two, tl, use_triton, view
from kvbench.kernels.prompt_tiles import (
    Rule,
    Vectors,
    dims_of,
    hidden,
    log_sum,
    logits_of,
    rule_of,
    same_dtype,
    slot_places,
    tile,
    weighed,
)

EPS = 1e-10  # inside the logarithm of the entropy, as in the released code of CAKE
MOST_QUERIES = 128  # of a window in the kernel, which holds all of them in registers
PROGRAMS = 264  # that the first pass aims at: two for each of the 132 multiprocessors of an H100


class WindowStatistics(NamedTuple):
    """Per query head and slot, [B,H_kv,G,T] float32: sum of the window's weights p over its queries, unbiased variance
    over them, and the sum of -p log(p + EPS)."""

    sums: Tensor
    variances: Tensor
    entropies: Tensor


def variance(rows: Tensor) -> Tensor:
    """Unbiased variance of each column over the window: [...,W,T] -> [...,T]."""
    if rows.element_size() < 4:
        return rows.var(-2)  # one rounding at the end
    # Two passes: on a CPU a tenth of the time of `var`, which walks this dimension token by token.
    spread = rows - rows.mean(-2, keepdim=True)
    return spread.square_().sum(-2) / max(1, rows.shape[-2] - 1)


def entropy(rows: Tensor) -> Tensor:
    """Each column's part of the rows' entropies: [...,W,T] -> [...,T]."""
    return -torch.mul(rows, (rows + EPS).log_()).sum(-2)


def window_statistics_ref(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> WindowStatistics:
    """The definition, from the rows. Arguments and result as in `window_statistics`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks)
    return WindowStatistics(rows.sum(-2), variance(rows), entropy(rows))


@jit
def _partial_sums(
    q_ptr: tl.tensor,
    k: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    H_kv: tl.tensor,
    W: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    each: tl.tensor,
    rule: Rule,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One program: base-2 log-sum-exp of BLOCK_R rows of one KV head over `each` blocks of slots; -inf of nothing."""
    tiles_of_rows = tl.cdiv(R, BLOCK_R)
    row = (tl.program_id(0) // tiles_of_rows).to(tl.int64)  # of B * H_kv
    rows = tl.program_id(0) % tiles_of_rows * BLOCK_R + tl.arange(0, BLOCK_R)
    q_place = tl.load(q_pos_ptr + row // H_kv * W + rows % W, mask=rows < R, other=-1).to(tl.int32)
    asking = Vectors(q_ptr + (row * R + rows) * DIMS.D, rows < R, 1)
    held = tile(asking, 0, DIMS.D, DIMS.BLOCK)
    k_ptr = at_head(k, row, H_kv)
    start = tl.program_id(1) * each * BLOCK_T
    blocks = tl.minimum(each, tl.cdiv(T - start, BLOCK_T))
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for step in range(blocks):
        slots = start + step * BLOCK_T + tl.arange(0, BLOCK_T)
        k_place = slot_places(k_pos_ptr + row * T, slots, T, False)
        own = Vectors(k_ptr + slots.to(tl.int64) * k.row, slots < T, k.dim)
        logits = logits_of(held, asking, own, rule, DIMS)
        logits = hidden(logits, q_place[:, None], k_place[None, :], rule.window)
        _, top, total, _ = weighed(logits, top, total)
    parts_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * R
    tl.store(parts_ptr + rows, log_sum(top, total, float("-inf")), mask=rows < R)


@jit
def _combine(
    parts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    W: tl.tensor,
    R: tl.tensor,
    splits: tl.tensor,
    BLOCK_R: tl.constexpr,
) -> None:
    """One program: BLOCK_R rows' log-sum-exp from that of their parts and sinks; +inf for a query that sees nothing."""
    row = tl.program_id(0).to(tl.int64)  # of B * H_kv
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row * (R // W) + rows // W, mask=rows < R, other=float("-inf"))
        top = sink.to(tl.float32) * 1.4426950408889634
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    for part in range(splits):
        lse = tl.load(parts_ptr + (row * splits + part) * R + rows, mask=rows < R, other=float("-inf"))
        _, top, total, _ = weighed(lse[:, None], top, total)
    tl.store(lse_ptr + row * R + rows, log_sum(top, total, float("inf")), mask=rows < R)


class Window(NamedTuple):
    """A window ready for a kernel: queries [B*H_kv,R,D], both positions, base-2 log-sum-exp [B*H_kv,R]."""

    queries: Tensor
    query_positions: Tensor
    key_positions: Tensor
    log_sum_exp: Tensor


@jit
def window_weights(
    asked: Window,
    held: tl.tensor,
    own: Vectors,
    k_place: tl.tensor,
    q_place: tl.tensor,
    first: tl.tensor,
    W: tl.tensor,
    rule: Rule,
    DIMS: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """Weights of one query head's W rows, from `first` on, at slots of keys `own`, the first numbers of which are held:
    [slots,BLOCK_W], 0 beyond the window."""
    members = tl.arange(0, BLOCK_W)
    lse = tl.load(asked.log_sum_exp + first + members, mask=members < W, other=float("inf"))
    asking = Vectors(asked.queries + (first + members) * DIMS.D, members < W, 1)
    logits = logits_of(held, own, asking, rule, DIMS)
    logits = hidden(logits, q_place[None, :], k_place[:, None], rule.window)
    return tl.exp2(logits - lse[None, :])


@jit
def _statistics(
    asked: Window,
    k: View,
    sums_ptr: tl.tensor,
    variances_ptr: tl.tensor,
    entropies_ptr: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    W: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    eps: tl.tensor,
    SPREAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One program: BLOCK_T slots of one KV head, its query heads in turn. The window's weights are in registers, so
    that the variance is that of two passes: deviations from the mean, squared."""
    tiles_of_slots = tl.cdiv(T, BLOCK_T)
    row = (tl.program_id(0) // tiles_of_slots).to(tl.int64)  # of B * H_kv
    slots = tl.program_id(0) % tiles_of_slots * BLOCK_T + tl.arange(0, BLOCK_T)
    k_place = slot_places(asked.key_positions + row * T, slots, T, False)
    members = tl.arange(0, BLOCK_W)
    q_place = tl.load(asked.query_positions + row // H_kv * W + members, mask=members < W, other=-1).to(tl.int32)
    own = Vectors(at_head(k, row, H_kv) + slots.to(tl.int64) * k.row, slots < T, k.dim)
    held = tile(own, 0, DIMS.D, DIMS.BLOCK)
    for g in range(G):
        first = (row * G + g) * W
        weights = window_weights(asked, held, own, k_place, q_place, first, W, rule, DIMS, BLOCK_W)
        sums = tl.sum(weights, 1)
        out = (row * G + g) * T + slots
        tl.store(sums_ptr + out, sums, mask=slots < T)
        if SPREAD:
            off = tl.where((members < W)[None, :], weights - (sums / W)[:, None], 0.0)
            tl.store(variances_ptr + out, tl.sum(off * off, 1) / tl.maximum(W - 1, 1), mask=slots < T)
            drawn = tl.sum(weights * tl.log(weights + eps), 1)
            tl.store(entropies_ptr + out, -drawn, mask=slots < T)


def tiles(dim: int, rows: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tile sizes and launch options of the two passes, the second for windows of `rows` / G queries at most 128.

    No register spills at D = 128 and up to 64 queries.
    """
    dims = dims_of(dim, dtype)
    if dtype == torch.float32:
        both = {"DIMS": dims, "BLOCK_T": 32, "num_warps": 4, "num_stages": 2}
        return {**both, "BLOCK_R": 32}, both
    wide = dims.WHOLE > 128
    block = min(64 if wide else 128, max(16, next_power_of_two(rows)))
    both = {"DIMS": dims, "num_warps": 4, "num_stages": 2 if wide else 3}
    return {**both, "BLOCK_R": block, "BLOCK_T": 64}, {**both, "BLOCK_T": 64 if wide else 128}


def prepared(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, sinks: Tensor | None, rule: Rule
) -> tuple[Window, View, dict[str, Any]]:
    """Two launches, log-sum-exp over parts of the slots and over all of them; and the tiles of what comes next."""
    queries, keys = same_dtype("window_statistics", queries, keys)
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    rows, pairs = query_heads // heads * new, batch * heads
    if new > MOST_QUERIES:
        raise ValueError(f"window_statistics holds a window in registers: at most {MOST_QUERIES} queries, got {new}")
    first, second = tiles(dim, rows, queries.dtype)
    queries = queries.reshape(pairs, rows, dim).contiguous()
    positions = query_positions.contiguous(), key_positions.contiguous()
    each, splits = _split(slots, first["BLOCK_T"], pairs * -(-rows // first["BLOCK_R"]))
    parts = torch.empty(pairs, splits, rows, dtype=torch.float32, device=keys.device)
    lse = torch.empty(pairs, rows, dtype=torch.float32, device=keys.device)
    with torch.cuda.device_of(keys):
        _partial_sums[pairs * -(-rows // first["BLOCK_R"]), splits](
            queries, view(keys), *positions, parts, heads, new, rows, slots, each, rule, **first
        )
        sunk = None if sinks is None else sinks.expand(batch, query_heads).contiguous()
        _combine[pairs, -(-rows // 64)](parts, sunk, lse, new, rows, splits, BLOCK_R=64)
    how = {"BLOCK_W": max(16, next_power_of_two(new)), **second}
    return Window(queries, *positions, lse), view(keys), how


def window_statistics_triton(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    spread: bool = True,
) -> WindowStatistics:
    """`window_statistics` in three launches: log-sum-exp over parts of the slots, over all, then each slot's sums.

    CUDA tensors, any strides; spread=False leaves variances and entropies out (empty). ValueError for float64, more
    than 128 queries, and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    (batch, query_heads, new, _), (heads, slots) = queries.shape, keys.shape[1:3]
    group = query_heads // heads
    rule = rule_of(scaling, softcap, sliding_window)
    asked, k, how = prepared(queries, keys, query_positions, key_positions, sinks, rule)
    sums = torch.empty(batch, heads, group, slots, dtype=torch.float32, device=keys.device)
    variances, entropies = (torch.empty_like(sums) if spread else sums.new_empty(0) for _ in range(2))
    with torch.cuda.device_of(keys):
        _statistics[batch * heads * -(-slots // how["BLOCK_T"]),](
            asked, k, sums, variances, entropies, heads, group, new, slots, rule, EPS, SPREAD=spread, **how
        )
    return WindowStatistics(sums, variances, entropies)


def _split(slots: int, block: int, programs: int) -> tuple[int, int]:
    """Blocks of slots for each program, and into how many parts that cuts the slots, given what runs beside them."""
    blocks = -(-slots // block)
    each = -(-blocks // max(1, min(blocks, PROGRAMS // programs)))
    return each, -(-blocks // each)


@torch.no_grad()
def window_statistics(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    spread: bool = True,
) -> WindowStatistics:
    """Sum, variance and entropy of what each slot draws from the queries of a window, without their rows in memory.

    queries [B,H_q,W,D], keys [B,H_kv,T,D], query_positions [B,W], key_positions [B,H_kv,T]; -1 = padding, empty slot. A
    query that is padding, or sees nothing, counts as a row of zeros. sinks [B or 1,H_q]: see `beside_sinks`. spread:
    variances and entropies are wanted.
    CUDA: Triton, ValueError without it. CPU: the rows.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks
    if use_triton(queries) and use_triton(keys):
        return window_statistics_triton(*call, spread)
    return window_statistics_ref(*call)

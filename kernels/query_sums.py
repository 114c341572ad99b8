# ruff: noqa: N803 - in kernels, sizes have their names in shapes
"""Statistics of the attention of many queries to each slot, in O(T) memory.

Column sums over all queries of a call (H2O), first and second moments of the group's mean attention (RoCo), and sum,
variance and entropy over an observation window (SnapKV, CAKE). The Triton kernels start from the log-sum-exp of the
queries' logits, which attention returns: weight = exp(logit - lse). Each kernel therefore reads the keys once.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, W queries of a window, T slots, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention
from kvbench.kernels.devices import LITTLE, shared_memory, use_triton
from kvbench.kernels.prompt import prompt_attention
from kvbench.kernels.references import FEW_QUERIES, Attended, attention_rows, softmax_blocks, widen
from kvbench.kernels.tiles import (
    Pointers,
    Rule,
    View,
    at_head,
    dims_of,
    hidden,
    jit,
    logits_of,
    next_power_of_two,
    query_blocks,
    query_places,
    rule_of,
    same_dtype,
    slot_places,
    tile,
    tl,
    view,
)

EPS = 1e-10  # inside the logarithm of the entropy, as in the released code of CAKE
MOST_QUERIES = 128  # maximum of a window in the kernel, which keeps all queries in registers
ROWS_AT_ONCE = 2**26  # numbers of attention rows in memory at a time: 256 MiB of float32


class Moments(NamedTuple):
    """Per slot, [B,H_kv,T] float32 each: the sum over queries of the group's mean attention, and of its square."""

    sums: Tensor
    squares: Tensor


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
    # Two passes take a tenth of the time of `var` on a CPU, which iterates over this dimension token by token.
    spread = rows - rows.mean(-2, keepdim=True)
    return spread.square_().sum(-2) / max(1, rows.shape[-2] - 1)


def entropy(rows: Tensor) -> Tensor:
    """Each column's part of the rows' entropies: [...,W,T] -> [...,T]."""
    return -torch.mul(rows, (rows + EPS).log_()).sum(-2)


@jit
def _over_queries(
    q: View, k: View, q_pos_ptr: tl.tensor, k_pos_ptr: tl.tensor, lse_ptr: tl.tensor, sums_ptr: tl.tensor,
    squares_ptr: tl.tensor, H_kv: tl.tensor, G: tl.tensor, M: tl.tensor, T: tl.tensor, rule: Rule,
    MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, DIMS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK_T slots of one query head (of one KV head: MOMENTS), their weights summed over all M queries.

    Tiles are [slots, queries]: the keys, as the left factor, stay in shared memory for the whole loop over blocks of
    queries and the heads of the group.
    """
    blocks_of_slots = tl.cdiv(T, BLOCK_T)
    start = tl.program_id(0) % blocks_of_slots * BLOCK_T
    row = (tl.program_id(0) // blocks_of_slots).to(tl.int64)  # of B * H_q, or of B * H_kv
    kv_row, first_head, heads = row // G, row, 1
    if MOMENTS:
        kv_row, first_head, heads = row, row * G, G
    q_ptr = at_head(q, first_head, H_kv * G)
    q_pos_ptr += kv_row // H_kv * M
    k_pos_ptr += kv_row * T
    lse_ptr += first_head * M
    slots = start + tl.arange(0, BLOCK_T)
    k_place = slot_places(k_pos_ptr, slots, T, ALIGNED)
    begin, blocks, masked = query_blocks(q_pos_ptr, k_place, start, M, T, rule.window, ALIGNED, BLOCK_M, BLOCK_T)
    own = Pointers(at_head(k, kv_row, H_kv) + slots.to(tl.int64) * k.row, slots < T, k.dim)
    held = tile(own, 0, DIMS.D, DIMS.BLOCK)
    sums = tl.zeros([BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    group = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)  # weights of the heads so far
    for part in tl.static_range(2):  # first the queries that see some of these slots, then the queries that see all
        first, steps = (0, masked) if part == 0 else (masked, blocks - masked)
        for step in range(steps * heads):  # Triton 3.9 overlaps loads with sums only in loops that start at 0
            queries = begin + (first + step // heads) * BLOCK_M + tl.arange(0, BLOCK_M)
            there, member = queries < M, step % heads
            lse = tl.load(lse_ptr + member * M + queries, mask=there, other=float("inf")) * 1.4426950408889634
            asking = Pointers(q_ptr + member * q.head + queries.to(tl.int64) * q.row, there, q.dim)
            logits = logits_of(held, own, asking, rule, DIMS)
            if part == 0:
                q_place = query_places(q_pos_ptr, queries, M, T, ALIGNED)
                logits = hidden(logits, q_place[None, :], k_place[:, None], rule.window)
            if MOMENTS:
                group += tl.exp2(logits - lse[None, :])
                done = tl.where(member == heads - 1, 1.0, 0.0)
                sums += tl.sum(group, 1) * done
                squares += tl.sum(group * group, 1) * done
                group *= 1.0 - done
            else:
                sums += tl.sum(tl.exp2(logits - lse[None, :]), 1)
    tl.store(sums_ptr + row * T + slots, sums / heads, mask=slots < T)
    if MOMENTS:
        tl.store(squares_ptr + row * T + slots, squares / (G * G), mask=slots < T)


@jit
def _over_window(
    q: View, k: View, q_pos_ptr: tl.tensor, k_pos_ptr: tl.tensor, lse_ptr: tl.tensor, sums_ptr: tl.tensor,
    variances_ptr: tl.tensor, entropies_ptr: tl.tensor, H_kv: tl.tensor, G: tl.tensor, W: tl.tensor, T: tl.tensor,
    rule: Rule, eps: tl.tensor, SPREAD: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, DIMS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK_T slots of one KV head, its query heads in turn. The window's weights are in registers, so
    that the variance is computed in two passes, from squared deviations from the mean."""
    blocks_of_slots = tl.cdiv(T, BLOCK_T)
    row = (tl.program_id(0) // blocks_of_slots).to(tl.int64)  # of B * H_kv
    slots = tl.program_id(0) % blocks_of_slots * BLOCK_T + tl.arange(0, BLOCK_T)
    k_place = slot_places(k_pos_ptr + row * T, slots, T, False)
    queries = tl.arange(0, BLOCK_W)
    there = queries < W
    q_place = tl.load(q_pos_ptr + row // H_kv * W + queries, mask=there, other=-1).to(tl.int32)
    own = Pointers(at_head(k, row, H_kv) + slots.to(tl.int64) * k.row, slots < T, k.dim)
    held = tile(own, 0, DIMS.D, DIMS.BLOCK)
    for g in range(G):
        head = row * G + g
        lse = tl.load(lse_ptr + head * W + queries, mask=there, other=float("inf")) * 1.4426950408889634
        asking = Pointers(at_head(q, head, H_kv * G) + queries.to(tl.int64) * q.row, there, q.dim)
        logits = logits_of(held, own, asking, rule, DIMS)
        logits = hidden(logits, q_place[None, :], k_place[:, None], rule.window)
        weights = tl.exp2(logits - lse[None, :])
        sums = tl.sum(weights, 1)
        out = head * T + slots
        tl.store(sums_ptr + out, sums, mask=slots < T)
        if SPREAD:
            off = tl.where(there[None, :], weights - (sums / W)[:, None], 0.0)
            tl.store(variances_ptr + out, tl.sum(off * off, 1) / tl.maximum(W - 1, 1), mask=slots < T)
            tl.store(entropies_ptr + out, -tl.sum(weights * tl.log(weights + eps), 1), mask=slots < T)


def sum_tiles(dim: int, dtype: torch.dtype, moments: bool, shared: int = LITTLE) -> dict[str, Any]:
    """Tile sizes and launch options of `_over_queries`: no register spills, and no more shared memory than available.

    Three stages: with two, Triton loads the next tile only after the multiplication of the current one. Moments use
    half as many queries at a time, because the weights of a group are also in registers.
    """
    dims = dims_of(dim, dtype)
    if dtype == torch.float32:
        block = 16 if dim > 128 else 32
        return {"DIMS": dims, "BLOCK_M": 32, "BLOCK_T": block, "num_warps": 4, "num_stages": 2}
    if dims.WHOLE > 128:
        stages = 3 if shared >= 136 * 1024 else 2
        return {"DIMS": dims, "BLOCK_M": 64, "BLOCK_T": 64, "num_warps": 4, "num_stages": stages}
    return {"DIMS": dims, "BLOCK_M": 32 if moments else 64, "BLOCK_T": 128, "num_warps": 4, "num_stages": 3}


def window_tiles(dim: int, window: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options of `_over_window`: no register spills at D = 128 and up to 64 queries."""
    dims, wide = dims_of(dim, dtype), max(16, next_power_of_two(window))
    if dtype == torch.float32:
        return {"DIMS": dims, "BLOCK_W": wide, "BLOCK_T": 32, "num_warps": 4, "num_stages": 2}
    narrow = dims.WHOLE > 128
    sizes = {"BLOCK_T": 64, "num_stages": 2} if narrow else {"BLOCK_T": 128, "num_stages": 3}
    return {"DIMS": dims, "BLOCK_W": wide, "num_warps": 4, **sizes}


def row_sums(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scaling: float,
    softcap: float | None, sliding_window: int | None, sinks: Tensor | None, aligned: bool = False,
) -> Tensor:  # fmt: skip
    """Natural log-sum-exp of the queries' logits, [B,H_q,M] float32, +inf for a query that sees nothing."""
    call = queries, keys, keys, query_positions, key_positions, scaling, softcap, sliding_window
    if queries.shape[2] <= MOST_QUERIES:
        found = decode_attention(*call).log_sum_exp
    else:
        found = prompt_attention(*call, aligned=aligned).log_sum_exp
    found = found.masked_fill(found == torch.inf, -torch.inf)
    if sinks is not None:
        found = torch.logaddexp(found, sinks.to(found.dtype)[..., None])
    return found.masked_fill(found == -torch.inf, torch.inf).contiguous()


def _sum_over_queries(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor,
    rule: tuple[float, float | None, int | None], log_sum_exp: Tensor | None, aligned: bool, sinks: Tensor | None,
    moments: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `_over_queries`: column sums [B,H_kv,G,T] and nothing, or both moments [B,H_kv,T]."""
    queries, keys = same_dtype("column_sums", queries, keys)
    positions = query_positions.contiguous(), key_positions.contiguous()
    if log_sum_exp is None:
        scaling, softcap, window = rule
        log_sum_exp = row_sums(queries, keys, *positions, scaling, softcap, window, sinks, aligned)
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    group = query_heads // heads
    sums = queries.new_empty((batch, heads, slots) if moments else (batch, heads, group, slots), dtype=torch.float32)
    squares = torch.empty_like(sums) if moments else sums.new_empty(0)
    how = sum_tiles(dim, queries.dtype, moments, shared_memory(queries.device))
    with torch.cuda.device_of(queries):
        _over_queries[-(-slots // how["BLOCK_T"]) * (sums.numel() // max(slots, 1)),](
            view(queries), view(keys), *positions, log_sum_exp.contiguous(), sums, squares, heads, group, new, slots,
            rule_of(*rule), MOMENTS=moments, ALIGNED=aligned, **how,
        )  # fmt: skip
    return sums, squares


@torch.no_grad()
def column_sums(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    log_sum_exp: Tensor | None = None,
    aligned: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    attended: Attended | None = None,
) -> Tensor:
    """Attention to each slot, summed over the queries: [B,H_kv,G,T] float32 (float64 for float64), in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    log_sum_exp [B,H_q,M]: the result of `prompt_attention`, which saves a pass over the keys; aligned: see there, saves
    reading positions. sinks [B or 1,H_q]: see `sink_factor`. bias [B,H_kv,T]: see
    `attention_logits`. attended: the attention output is computed from the same rows and written here, in PyTorch.
    CUDA: Triton, ValueError without it. A few queries, or a bias: PyTorch on any device.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    if log_sum_exp is None and attended is None and queries.shape[2] <= FEW_QUERIES:
        return attention_rows(*call, sinks, bias).sum(-2)
    if attended is None and bias is None and use_triton(queries, keys):
        return _sum_over_queries(*call[:4], call[4:], log_sum_exp, aligned, sinks, moments=False)[0]
    batch, heads, slots = key_positions.shape
    total = widen(keys.new_empty(0)).new_zeros(batch, heads, queries.shape[1] // heads, slots)
    for reached, weights, inverse in softmax_blocks(*call, attended, sinks, bias):
        total[..., reached] += inverse[..., None, :].matmul(weights).squeeze(-2)
    return total


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
    log_sum_exp: Tensor | None = None,
    aligned: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Moments:
    """Moments of the attention of the queries of a call to each slot. Arguments and devices as in `column_sums`."""
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    if queries.shape[2] <= FEW_QUERIES and attended is None and log_sum_exp is None:
        mean = attention_rows(*call, sinks, bias).mean(2)  # [B,H_kv,M,T]
        return Moments(mean.sum(-2), mean.square().sum(-2))
    if attended is None and bias is None and use_triton(queries, keys):
        return Moments(*_sum_over_queries(*call[:4], call[4:], log_sum_exp, aligned, sinks, moments=True))
    sums, squares = widen(keys.new_empty(0)).new_zeros(2, *key_positions.shape)
    for reached, weights, inverse in softmax_blocks(*call, attended, sinks, bias):
        share = inverse[..., None] / inverse.shape[2]
        mean = weights[:, :, 0].mul_(share[:, :, 0])  # [B,H_kv,R,S], in the block's own buffer
        for head in range(1, inverse.shape[2]):
            mean.addcmul_(weights[:, :, head], share[:, :, head])
        sums[..., reached] += mean.sum(-2)
        squares[..., reached] += mean.square_().sum(-2)
    return Moments(sums, squares)


def computes_window(queries: Tensor, keys: Tensor, window: int) -> bool:
    """Whether a kernel computes `window_statistics` of this many queries, without rows in memory."""
    return 1 < window <= MOST_QUERIES and use_triton(queries, keys)


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
    log_sum_exp: Tensor | None = None,
) -> WindowStatistics:
    """Sum, variance and entropy of the attention of a window's queries to each slot.

    queries [B,H_q,W,D], keys [B,H_kv,T,D], query_positions [B,W], key_positions [B,H_kv,T]; -1 = padding, empty slot. A
    query that is padding, or sees nothing, counts as a row of zeros. sinks [B or 1,H_q]: see `sink_factor`.
    spread=False: without variances and entropies (empty). log_sum_exp [B,H_q,W]: of the window's logits, if known.
    CUDA: Triton, windows of at most 128 queries, no rows in memory; ValueError without Triton. CPU: softmax rows.
    """
    rule = scaling, softcap, sliding_window
    if not use_triton(queries, keys):
        rows = attention_rows(queries, keys, query_positions, key_positions, *rule, sinks)
        return WindowStatistics(rows.sum(-2), variance(rows), entropy(rows))
    queries, keys = same_dtype("window_statistics", queries, keys)
    (batch, query_heads, new, dim), (heads, slots) = queries.shape, keys.shape[1:3]
    if new > MOST_QUERIES:
        raise ValueError(f"window_statistics holds a window in registers: at most {MOST_QUERIES} queries, got {new}")
    positions = query_positions.contiguous(), key_positions.contiguous()
    if log_sum_exp is None:
        log_sum_exp = row_sums(queries, keys, *positions, scaling, softcap, sliding_window, sinks)
    sums = torch.empty(batch, heads, query_heads // heads, slots, dtype=torch.float32, device=keys.device)
    variances, entropies = (torch.empty_like(sums) if spread else sums.new_empty(0) for _ in range(2))
    how = window_tiles(dim, new, queries.dtype)
    with torch.cuda.device_of(keys):
        _over_window[batch * heads * -(-slots // how["BLOCK_T"]),](
            view(queries), view(keys), *positions, log_sum_exp.contiguous(), sums, variances, entropies, heads,
            query_heads // heads, new, slots, rule_of(*rule), EPS, SPREAD=spread, **how,
        )  # fmt: skip
    return WindowStatistics(sums, variances, entropies)


@torch.no_grad()
def window_largest(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The largest KV head's mean attention at each slot, summed over the window: [B,T] float32 (K-VEC's importance).

    Arguments as in `window_statistics`; all heads have the same tokens in the same slots. bias [B,H_kv,T]: see
    `attention_logits`. In PyTorch on every device, some queries at a time.
    """
    at_once = max(1, ROWS_AT_ONCE // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
    rest = key_positions, scaling, softcap, sliding_window, sinks, bias
    total = torch.zeros((), device=keys.device)
    for some, places in zip(queries.split(at_once, 2), query_positions.split(at_once, 1), strict=True):
        total = total + attention_rows(some, keys, places, *rest).mean(2).amax(1).sum(-2)
    return total

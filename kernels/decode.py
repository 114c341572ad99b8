# ruff: noqa: N803 - in kernels, sizes have their names in shapes
"""Attention of the newest queries over the stored slots, and the statistics that evictions need, in one pass.

The slots of every KV head are split over programs (flash-decoding, Dao et al. 2023); a second launch joins the parts,
if there are several.
Segments of KV heads and sequences may have different lengths, so that sequences with different budgets decode in one
launch. If weights are needed, the first launch stores its logits (4 G bytes per slot; keys and values in 16 bits have
4 D bytes) and one more launch converts them to weights, so that keys are read once.

Shapes: B batch, H_q query heads, H_kv KV heads, R = B * H_kv, G = H_q / H_kv, M queries, T slots, N flat slots of all
segments, D head dim of queries and keys, D_v of values. Logits are in base 2, results in base e.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.devices import multipliable, programs_at_once, use_triton
from kvbench.kernels.join import join
from kvbench.kernels.references import Attention, NewTokens, append, decode_attention_flat_ref, decode_attention_ref
from kvbench.kernels.tiles import (
    Dims,
    Pointers,
    Rule,
    View,
    at_head,
    attend,
    empty_part,
    fit_heads,
    hidden,
    in_sight,
    jit,
    logits_of,
    next_power_of_two,
    of_head,
    parts_of,
    require_triton,
    rule_of,
    segment,
    slots_of_a_part,
    store_part,
    tile,
    tl,
    view,
    with_sinks,
)

REGISTERS = 255  # maximum per thread; without it ptxas chooses 168 for four warps and spills a few
SLOTS_A_PART = 512  # maximum, if lengths are only on the device: a long segment has many programs
SLOTS_WEIGHED = 256  # slots of one program of `_weigh`


@jit
def _append(
    x: View, new: View, slot: tl.tensor, begin: tl.tensor, end: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> None:
    """Write a head's new token into its slot of x if that slot is one of `begin` up to `end`."""
    dims = tl.arange(0, BLOCK_D)
    there = (dims < D) & (slot + dims * 0 >= begin) & (slot + dims * 0 < end)
    numbers = tl.load(new.ptr + dims * new.dim, mask=there)
    tl.store(x.ptr + slot * x.row + dims * x.dim, numbers, mask=there)


@jit
def _places(ptrs: tl.tensor, there: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The positions of queries, the oldest and the newest of them."""
    places = tl.load(ptrs, mask=there, other=-1).to(tl.int32)
    newest = tl.max(places, 0)
    return places, tl.min(tl.where(places < 0, 2**30, places), 0), newest


@partial(jit, varying=("T", "each"))
def _attend(
    q: View, q_pos: View, stored_k: View, stored_v: View, positions: View, biases: View, starts_ptr: tl.tensor,
    counts_ptr: tl.tensor, new_k: View, new_v: View, new_slots_ptr: tl.tensor, sinks_ptr: tl.tensor,
    logits_ptr: tl.tensor, out_ptr: tl.tensor, lse_ptr: tl.tensor, H_kv: tl.tensor, G: tl.tensor, M: tl.tensor,
    T: tl.tensor, each: tl.tensor, rule: Rule, D_V: tl.constexpr, DIMS: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """One program: `each` slots of one KV head for ROWS of its G * M query rows; row g * M + m is query m of head g.

    The first part of a segment includes the sinks, so that it is stored even if the segment is empty.
    """
    kv_row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length = segment(starts_ptr, counts_ptr, kv_row, T)
    begin = part * each
    if begin >= tl.maximum(length, 1):
        return
    end = tl.minimum(begin + each, length)
    k, v = of_head(stored_k, kv_row, H_kv, start), of_head(stored_v, kv_row, H_kv, start)
    k_pos, bias = None, None  # Triton 3.6: a None is an argument of its own, not in a tuple or of another function
    if positions is not None:
        k_pos = of_head(positions, kv_row, H_kv, start)
    if biases is not None:
        bias = of_head(biases, kv_row, H_kv, start)
    if new_slots_ptr is not None:  # the program that reads the new token's slot writes it first
        slot = tl.load(new_slots_ptr + kv_row)
        _append(k, of_head(new_k, kv_row, H_kv, 0), slot, begin, end, DIMS.D, DIMS.WHOLE)
        _append(v, of_head(new_v, kv_row, H_kv, 0), slot, begin, end, D_V, BLOCK_V)
        tl.debug_barrier()  # all threads of the program
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    there = rows < G * M
    at = at_head(q, kv_row * G, H_kv * G) + (rows // M).to(tl.int64) * q.head + (rows % M).to(tl.int64) * q.row
    asked = Pointers(at, there, q.dim)
    query = tile(asked, 0, DIMS.D, DIMS.BLOCK)
    q_place, oldest, newest = rows, 0, 0
    if q_pos is not None:
        q_place, oldest, newest = _places(at_head(q_pos, kv_row, H_kv) + rows % M * q_pos.row, there)
    top, total, out = empty_part(ROWS, BLOCK_V)
    for step in range(tl.cdiv(end - begin, BLOCK_T)):
        slots = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)
        wide, needed, k_place = slots.to(tl.int64), slots < end, slots
        if k_pos is not None:  # slots that no query of this tile may see are not read
            k_place = tl.load(k_pos.ptr + wide * k_pos.row, mask=needed, other=-1).to(tl.int32)
            needed = in_sight(k_place, oldest, newest, rule.window)
        keys = Pointers(k.ptr + wide * k.row, needed, k.dim)
        logits = logits_of(query, asked, keys, rule, DIMS)
        if bias is not None:
            added = tl.load(bias.ptr + wide * bias.row, mask=needed, other=0.0)
            logits += added[None, :] * 1.4426950408889634
        logits = tl.where(needed[None, :], logits, float("-inf"))
        if k_pos is not None:
            logits = hidden(logits, q_place[:, None], k_place[None, :], rule.window)
        if logits_ptr is not None:
            own = logits_ptr + (kv_row * G * M + rows)[:, None] * T + wide[None, :]
            tl.store(own, logits, mask=there[:, None] & (slots < end)[None, :])
        values = Pointers(v.ptr + wide * v.row, needed, v.dim)
        top, total, out = attend(logits, tile(values, 0, D_V, BLOCK_V), top, total, out)
    if sinks_ptr is not None:
        top, total, out = with_sinks(top, total, out, sinks_ptr, kv_row % H_kv * G + rows // M, there, part)
    places = (kv_row * tl.num_programs(1) + part) * G * M + rows
    store_part(out_ptr, lse_ptr, places, there, top, total, out, tl.arange(0, BLOCK_V), D_V)


@partial(jit, varying=("T",))
def _weigh(
    logits_ptr: tl.tensor, lse_ptr: tl.tensor, sums: View, starts_ptr: tl.tensor, counts_ptr: tl.tensor,
    H_kv: tl.tensor, G: tl.tensor, M: tl.tensor, T: tl.tensor, WEIGHTS: tl.constexpr, PER_QUERY_HEAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK_T slots of one KV head, logits become WEIGHTS in place and are added to `sums`."""
    kv_row = tl.program_id(0).to(tl.int64)
    start, length = segment(starts_ptr, counts_ptr, kv_row, T)
    slots = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.arange(0, BLOCK_G)
    drawn = tl.zeros([BLOCK_G, BLOCK_T], tl.float32)
    there = (heads < G)[:, None] & (slots < length)[None, :]
    for query in range(M):
        rows = kv_row * G * M + heads * M + query
        lse = tl.load(lse_ptr + rows, mask=heads < G, other=float("-inf"))
        shift = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
        at = logits_ptr + rows[:, None] * T + slots[None, :]
        weights = tl.exp2(tl.load(at, mask=there, other=float("-inf")) - shift[:, None])
        if WEIGHTS:  # 0 beyond the end of a segment
            tl.store(at, weights, mask=(heads < G)[:, None] & (slots < T)[None, :])
        drawn += weights
    if sums is not None:
        own = of_head(sums, kv_row, H_kv, start)
        at = own.ptr + slots.to(tl.int64) * own.row
        if PER_QUERY_HEAD:
            each = at[None, :] + heads[:, None] * own.dim
            tl.store(each, tl.load(each, mask=there, other=0.0) + drawn, mask=there)
        else:
            before = tl.load(at, mask=slots < length, other=0.0)
            tl.store(at, before + tl.sum(drawn, 0) / G, mask=slots < length)


def tiles(rows: int, dim: int, value_dim: int, dtype: torch.dtype, placed: bool) -> dict[str, Any]:
    """Tile sizes and launch options for `rows` query rows per KV head: no spills, at most 99 KiB of shared memory.

    16-bit keys and values: 16 KiB of each at a time, two tiles in flight (four of half the width). Positions
    (`placed`) are read before the keys, which needs twice the stages. float32 does not use tensor cores.
    """
    whole, wide = max(16, next_power_of_two(dim)), max(16, next_power_of_two(value_dim))
    warps = 4 if max(whole, wide) <= 128 else 8
    if dtype == torch.float32:
        dims = Dims(dim, max(32, whole), 32 if warps == 4 else 16)
        return {"DIMS": dims, "BLOCK_V": wide, "ROWS": 16, "BLOCK_T": 16, "num_warps": warps, "num_stages": 2}
    most_rows = 32 if max(whole, wide) <= (64 if placed else 128) else 16  # more rows spill
    slots = max(16, min(64, 8192 // max(whole, wide)))
    ahead = 2 if max(whole, wide) > 64 else 4
    sizes = {"DIMS": Dims(dim, whole, whole), "BLOCK_V": wide, "BLOCK_T": slots}
    fitting = min(most_rows, max(16, next_power_of_two(rows)))
    return {**sizes, "ROWS": fitting, "num_warps": warps, "num_stages": 1 + 2 * ahead if placed else 1 + ahead}


def _launch(
    queries: Tensor, keys: Tensor, values: Tensor, positions: tuple[Tensor, Tensor] | None,
    segments: tuple[Tensor, Tensor] | None, heads: int, slots: int,
    how: tuple[float, float | None, int | None, Tensor | None], weights: bool, sums: Tensor | None,
    programs: int | None, new_tokens: NewTokens | None = None, bias: Tensor | None = None,
) -> Attention:  # fmt: skip
    """All launches; how: scaling, softcap, sliding_window, sinks. Without positions every query sees every slot.

    keys, values and the slots' positions are [B,H_kv,T,...], or flat [N,...] with segments = starts, counts, each count
    at most `slots`.
    """
    require_triton("decode_attention", queries.device)
    fit_heads("decode_attention", keys.shape[-1], values.shape[-1])
    if queries.dtype == torch.float64 or not queries.dtype == keys.dtype == values.dtype:
        found = ", ".join(str(x.dtype) for x in (queries, keys, values))
        raise ValueError(f"decode_attention takes queries, keys and values of one dtype, not float64; got {found}")
    kept, (batch, query_heads, new, dim) = values.dtype, queries.shape
    queries, keys, values = multipliable(queries, keys, values)
    scaling, softcap, sliding_window, sinks = how
    group, value_dim, pairs = query_heads // heads, values.shape[-1], batch * heads
    assert sums is None or (sums.dtype == torch.float32 and sums.shape[-1] in (1, group)), "one sum a head or a group"
    rows = group * new
    sizes = tiles(rows, dim, value_dim, keys.dtype, positions is not None)
    blocks = -(-rows // sizes["ROWS"])
    each = slots_of_a_part(
        pairs * blocks, slots, sizes["BLOCK_T"], programs or programs_at_once(queries.device),
        None if segments is None else SLOTS_A_PART,
    )  # fmt: skip
    parts = max(1, -(-slots // each))
    part_out, part_lse = parts_of(queries, parts, heads, value_dim)
    scored = weights or sums is not None
    logits = part_lse.new_empty(batch, heads, group, new, slots) if scored else None
    starts, counts = segments or (None, None)
    flat = () if segments is None else (0, 0)
    q_pos, k_pos = None, None
    if positions is not None:
        q_pos = View(positions[0], positions[0].stride(0), 0, positions[0].stride(1))
        k_pos = View(positions[1], *flat, *positions[1].stride())
    k, v = (View(x, *flat, *x.stride()) for x in (keys, values))
    bias_view = None if bias is None else View(bias, *flat, *bias.stride())
    token: tuple[object, ...] = (None, None, None)
    if new_tokens is not None:
        token = view(new_tokens.keys), view(new_tokens.values), new_tokens.slots
    with torch.cuda.device_of(queries):
        _attend[pairs, parts, blocks](
            view(queries), q_pos, k, v, k_pos, bias_view, starts, counts, *token, sinks, logits,
            part_out, part_lse, heads, group, new, slots, each, rule_of(scaling, softcap, sliding_window),
            D_V=value_dim, maxnreg=REGISTERS, **sizes,
        )  # fmt: skip
        out, log_sum_exp = join(part_out, part_lse, queries, heads, slots, each, counts)
        if scored:
            added = None if sums is None else View(sums, *(0,) * (4 - sums.dim()), *sums.stride())
            _weigh[pairs, -(-slots // SLOTS_WEIGHED)](
                logits, log_sum_exp, added, starts, counts, heads, group, new, slots, WEIGHTS=weights,
                PER_QUERY_HEAD=sums is not None and sums.shape[-1] > 1, BLOCK_G=next_power_of_two(group),
                BLOCK_T=SLOTS_WEIGHED,
            )  # fmt: skip
    return Attention(out.to(kept), log_sum_exp, logits if weights else None)


@torch.no_grad()
def decode_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    packed: bool = False,
    weights: bool = False,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
    programs: int | None = None,
) -> Attention:
    """Attention of a few queries over the stored slots, and the statistics that evictions use.

    queries [B,H_q,M,D], M small, over keys [B,H_kv,T,D] and values [B,H_kv,T,D_v]; query_positions [B,M] and
    key_positions [B,H_kv,T] are original positions for the causal mask, -1 = padding, empty slot. packed: every
    query sees every slot; positions and sliding_window are not read. sinks [H_q]: a logit per query head that is
    part of the softmax but not of the output. weights: return them. sums [B,H_kv,T,G or 1] float32: the attention to
    each slot is added here in place, per query head or as the mean over a group. bias [B,H_kv,T]
    float32: added to the logits of a slot, after the soft cap. programs: approximate number of programs (default:
    the number that the device runs at once). CUDA: Triton, any strides, ValueError without it. CPU, float64: PyTorch.
    """
    if not use_triton(queries):
        return decode_attention_ref(
            queries, keys, values, query_positions, key_positions, scaling, softcap, sliding_window, sinks, packed,
            weights, sums, bias,
        )  # fmt: skip
    positions = None
    if packed:
        sliding_window = None
    else:
        assert query_positions is not None
        assert key_positions is not None
        positions = query_positions, key_positions
    how = scaling, softcap, sliding_window, sinks
    return _launch(
        queries, keys, values, positions, None, keys.shape[1], keys.shape[2], how, weights, sums, programs, bias=bias
    )


@torch.no_grad()
def decode_attention_flat(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    most: int,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
    sums: Tensor | None = None,
    new_tokens: NewTokens | None = None,
    bias: Tensor | None = None,
    programs: int | None = None,
) -> Attention:
    """`decode_attention` over segments of flat tensors: one segment for each KV head of every sequence.

    keys [N,D], values [N,D_v], key_positions and bias [N]; segment (b, h) is slots starts[b,h] to starts[b,h] +
    counts[b,h]. starts, counts [B,H_kv] are read on the device, so that a CUDA graph follows their changes; most bounds
    every count. Weights are padded to [B,H_kv,G,M,most]; sums are flat, [N,G or 1]. new_tokens: keys and values that
    are written into their segments first.
    """
    if not use_triton(queries):
        return decode_attention_flat_ref(
            queries, keys, values, query_positions, key_positions, starts, counts, most, scaling, softcap,
            sliding_window, sinks, weights, sums, new_tokens, bias,
        )  # fmt: skip
    if new_tokens is not None and multipliable(keys)[0] is not keys:  # the interpreter computes on copies
        stored, new = {"keys": keys, "values": values}, {"keys": new_tokens.keys, "values": new_tokens.values}
        append(stored, new, starts, new_tokens.slots)
        new_tokens = None
    segments, positions = (starts.contiguous(), counts.contiguous()), (query_positions, key_positions)
    how = scaling, softcap, sliding_window, sinks
    return _launch(
        queries, keys, values, positions, segments, starts.shape[1], most, how, weights, sums, programs, new_tokens,
        bias,
    )  # fmt: skip

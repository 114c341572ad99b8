# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of the newest queries over the stored slots, and in the same pass what an eviction asks of it.

The slots of all KV heads are one list of work that programs share (work_list.py; flash-decoding, Dao et al. 2023); a
second launch joins the parts. Where weights are asked for, the first leaves its logits (4 G bytes a slot, beside 4 D of
keys and values in 16 bits) and the second makes them weights: keys are read once.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, N flat slots of all segments,
D head dim of queries and keys, D_v of values. Logits are in base 2 (GPUs have exp2 in hardware), results in base e.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_logits, visible, widen
from kvbench.kernels.decode_tile import Asking, Slots, append_token, attend_tile, store_part
from kvbench.kernels.jit import (
    View,
    at_head,
    fit_heads,
    jit,
    next_power_of_two,
    of_head,
    require_triton,
    tl,
    use_triton,
    view,
)
from kvbench.kernels.join_splits import Asked, Parts, finish
from kvbench.kernels.prompt_tiles import Dims, Rule, Vectors, rule_of, tile
from kvbench.kernels.work_list import Work, segment, share_of

REGISTERS = 255  # of a thread, at most; left alone, ptxas takes 168 of four warps and spills a few


class Attention(NamedTuple):
    """out [B,H_q,M,D_v] as the values are; log_sum_exp [B,H_q,M] float32; weights [B,H_kv,G,M,T] float32 or None.

    log_sum_exp is the natural logarithm of what divides the weights, the sink's share included. A query that sees
    nothing gets out 0 and weights 0; its log_sum_exp is that of its sink alone, -inf without one.
    """

    out: Tensor
    log_sum_exp: Tensor
    weights: Tensor | None


class NewTokens(NamedTuple):
    """Tokens that flat storage takes in before it is attended to: keys, values [B,H_kv,1,...] into slots [B,H_kv],
    int64 and contiguous, counted from where their segments start, each inside its segment."""

    keys: Tensor
    values: Tensor
    slots: Tensor


def decode_attention_ref(
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
) -> Attention:
    """The definition: all rows at once in float32. Arguments and result as in `decode_attention`."""
    logits = attention_logits(queries, keys, scaling, softcap, bias)
    if not packed:
        assert query_positions is not None
        assert key_positions is not None
        seen = visible(query_positions, key_positions, sliding_window)  # [B,H_kv,M,T]
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        values = values.masked_fill((key_positions < 0)[..., None], 0.0)  # whatever an empty slot holds: weight 0
    all_logits = logits
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        all_logits = torch.cat([logits, sink], dim=-1)
    log_sum_exp = all_logits.logsumexp(-1)
    rows = (logits - log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)[..., None]).exp()
    if sums is not None:
        drawn = rows.sum(3).transpose(-1, -2)  # [B,H_kv,T,G]
        sums += drawn if sums.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)
    out = (rows @ widen(values)[:, :, None]).flatten(1, 2).to(values.dtype)
    return Attention(out, log_sum_exp.flatten(1, 2), rows if weights else None)


@jit
def _asking(
    q: View,
    q_pos: View,
    kv_row: tl.tensor,
    rows: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    DIMS: tl.constexpr,
) -> Asking:
    """Query rows of a KV head: row g * M + m is query m of query head g of its group."""
    there = rows < G * M
    at = at_head(q, kv_row * G, H_kv * G) + (rows // M).to(tl.int64) * q.head + (rows % M).to(tl.int64) * q.row
    asked = Vectors(at, there, q.dim)
    places, newest, oldest = rows, 0, 0
    if q_pos is not None:
        places = tl.load(at_head(q_pos, kv_row, H_kv) + rows % M * q_pos.row, mask=there, other=-1).to(tl.int32)
        newest = tl.max(places, 0)
        oldest = tl.min(tl.where(places < 0, 2**30, places), 0)
    return Asking(asked, tile(asked, 0, DIMS.D, DIMS.BLOCK), places, newest, oldest)


@partial(jit, varying=("R", "T"))
def _attend_list(
    q: View,
    q_pos: View,
    held: Slots,
    starts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    new_k: View,
    new_v: View,
    new_slots_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    D_V: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program: its share of all tiles, KV head after KV head, for ROWS of the G * M query rows of each.

    Without starts and counts every KV head has T slots; without positions all are seen.
    """
    program = tl.program_id(0).to(tl.int64)
    begin, end, first_row, last_row, before = share_of(Work(R, T, counts_ptr), program, tl.num_programs(0), BLOCK_T)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    for kv_row in range(first_row, last_row):
        asking = _asking(q, q_pos, kv_row, rows, H_kv, G, M, DIMS)
        start, length = segment(starts_ptr, counts_ptr, kv_row, T)
        k, v = of_head(held.k, kv_row, H_kv, start), of_head(held.v, kv_row, H_kv, start)
        stored = Slots(k, v, of_head(held.positions, kv_row, H_kv, start), of_head(held.bias, kv_row, H_kv, start))
        logits_at = None
        if logits_ptr is not None:
            logits_at = logits_ptr + (kv_row * G * M + rows) * T
        tiles = tl.cdiv(length, BLOCK_T)
        first = tl.maximum(begin - before, 0).to(tl.int32)
        steps = tl.minimum(end - before, tiles).to(tl.int32) - first
        if new_slots_ptr is not None:  # whoever reads a new token's slot writes it before
            slot, least, past = tl.load(new_slots_ptr + kv_row), first * BLOCK_T, (first + steps) * BLOCK_T
            append_token(k, of_head(new_k, kv_row, H_kv, 0), slot, least, past, DIMS.D, DIMS.WHOLE)
            append_token(v, of_head(new_v, kv_row, H_kv, 0), slot, least, past, D_V, BLOCK_V)
            tl.debug_barrier()  # of all its threads
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, BLOCK_V], tl.float32)
        for step in range(steps):
            slots = (first + step) * BLOCK_T + tl.arange(0, BLOCK_T)
            top, total, out = attend_tile(
                asking, stored, logits_at, slots, length, top, total, out, rule, DIMS, D_V, BLOCK_V
            )
        place = (program + kv_row) * G * M + rows
        store_part(out_ptr, lse_ptr, place, rows < G * M, top, total, out, tl.arange(0, BLOCK_V), D_V)
        before += tiles


def tiles(rows: int, dim: int, value_dim: int, dtype: torch.dtype, placed: bool) -> dict[str, Any]:
    """Tile sizes and launch options for `rows` query rows per KV head: no spills, at most 99 KiB of shared memory.

    16-bit keys and values: 16 KiB of each at a time, two tiles on their way (four half as wide). Where positions are
    read first, which say what need not be read (placed), it takes twice the stages to be as far ahead. float32 in full
    precision is summed by ordinary cores, some dimensions at a time.
    """
    whole, wide = max(16, next_power_of_two(dim)), max(16, next_power_of_two(value_dim))
    warps = 4 if max(whole, wide) <= 128 else 8
    if dtype == torch.float32:
        dims = Dims(dim, max(32, whole), 32 if warps == 4 else 16)
        return {"DIMS": dims, "BLOCK_V": wide, "ROWS": 16, "BLOCK_T": 16, "num_warps": warps, "num_stages": 2}
    most_rows = 32 if max(whole, wide) <= (64 if placed else 128) else 16  # more spill
    slots = max(16, min(64, 8192 // max(whole, wide)))
    ahead = 2 if max(whole, wide) > 64 else 4
    sizes = {"DIMS": Dims(dim, whole, whole), "BLOCK_V": wide, "BLOCK_T": slots}
    fitting = min(most_rows, max(16, next_power_of_two(rows)))
    return {**sizes, "ROWS": fitting, "num_warps": warps, "num_stages": 1 + 2 * ahead if placed else 1 + ahead}


@lru_cache(maxsize=64)
def programs_at_once(device: torch.device) -> int:
    """Programs a device runs together: two per SM, by the shared memory they take; the interpreter is given a few."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: tuple[Tensor, Tensor] | None,
    segments: tuple[Tensor, Tensor] | None,
    heads: int,
    slots: int,
    how: tuple[float, float | None, int | None, Tensor | None],
    weights: bool,
    sums: Tensor | None,
    programs: int | None,
    new_tokens: NewTokens | None = None,
    bias: Tensor | None = None,
) -> Attention:
    """Both launches; how: scaling, softcap, sliding_window, sinks. Without positions every query sees every slot.

    keys, values and the slots' positions are [B,H_kv,T,...], with a bias [B,H_kv,T] perhaps, or flat [N,...] with
    segments = starts, counts, each count at most `slots`, and perhaps new tokens.
    """
    require_triton("decode_attention", queries.device)
    _check(queries, keys, values, heads, sums)
    kept, (batch, query_heads, new, dim) = values.dtype, queries.shape
    if not queries.is_cuda and kept == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bfloat16 (3.9); these are its values
        queries, keys, values = queries.float(), keys.float(), values.float()
    scaling, softcap, sliding_window, sinks = how
    rows, value_dim, pairs = query_heads // heads * new, values.shape[-1], batch * heads
    sizes = tiles(rows, dim, value_dim, keys.dtype, positions is not None)
    if programs is None:
        programs = max(1, min(programs_at_once(queries.device), pairs * -(-slots // sizes["BLOCK_T"])))
    group = query_heads // heads
    part_out = queries.new_empty(programs + pairs, rows, value_dim, dtype=torch.float32)
    part_lse = queries.new_empty(programs + pairs, rows, dtype=torch.float32)
    scored = weights or sums is not None
    logits = part_lse.new_empty(batch, heads, group, new, slots) if scored else None
    starts, counts = segments or (None, None)
    flat = () if segments is None else (0, 0)
    q_pos, k_pos = None, None
    if positions is not None:
        q_pos = View(positions[0], positions[0].stride(0), 0, positions[0].stride(1))
        k_pos = View(positions[1], *flat, *positions[1].stride())
    k, v = (View(x, *flat, *x.stride()) for x in (keys, values))
    held = Slots(k, v, k_pos, None if bias is None else view(bias))
    token: tuple[object, ...] = (None, None, None)
    if new_tokens is not None:
        token = view(new_tokens.keys), view(new_tokens.values), new_tokens.slots
    with torch.cuda.device_of(queries):
        _attend_list[programs, -(-rows // sizes["ROWS"])](
            view(queries), q_pos, held, starts, counts, *token, logits, part_out, part_lse, heads, group, new, pairs,
            slots, rule_of(scaling, softcap, sliding_window), D_V=value_dim, maxnreg=REGISTERS, **sizes,
        )  # fmt: skip
        parts = Parts(part_out, part_lse, programs, sizes["BLOCK_T"], slots)
        asked = Asked(logits, weights, sums, segments, sinks)
        out, log_sum_exp = finish(parts, queries, heads, values.dtype, asked)
    return Attention(out.to(kept), log_sum_exp, logits if weights else None)


def _check(queries: Tensor, keys: Tensor, values: Tensor, heads: int, sums: Tensor | None) -> None:
    """ValueError for what the kernel cannot compute."""
    fit_heads("decode_attention", keys.shape[-1], values.shape[-1])
    dtypes = {queries.dtype, keys.dtype, values.dtype}
    if len(dtypes) > 1:
        raise ValueError(
            f"decode_attention takes queries, keys and values of one dtype, got {sorted(map(str, dtypes))}"
        )
    if queries.dtype == torch.float64:
        raise ValueError("decode_attention sums in float32 and takes no float64 tensors: use decode_attention_ref")
    group = queries.shape[1] // heads
    if sums is not None and (sums.dtype != torch.float32 or sums.shape[-1] not in (1, group)):
        raise ValueError(f"sums must be float32 [...,{group}] or [...,1], got {sums.dtype} {list(sums.shape)}")


@torch.no_grad()
def decode_attention_triton(
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
    programs: int | None = None,
    bias: Tensor | None = None,
) -> Attention:
    """`decode_attention` in two launches. Any strides.

    programs: how many share all slots, as many as the device runs at once where None. ValueError for float64, mixed
    dtypes and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    positions = None
    if packed:
        sliding_window = None
    else:
        assert query_positions is not None
        assert key_positions is not None
        positions = query_positions, key_positions
    how = scaling, softcap, sliding_window, sinks
    return launch(
        queries, keys, values, positions, None, keys.shape[1], keys.shape[2], how, weights, sums, programs,
        bias=bias,
    )  # fmt: skip


def decodes(queries: Tensor) -> bool:
    """Whether a step of queries [B,H_q,M,D] goes through the kernel: one query, where Triton runs, no gradients."""
    return queries.shape[2] == 1 and use_triton(queries) and not (torch.is_grad_enabled() and queries.requires_grad)


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
) -> Attention:
    """Attention of a few queries over the stored slots, and what an eviction reads of it, in one pass over the keys.

    queries [B,H_q,M,D], M small, over keys [B,H_kv,T,D] and values [B,H_kv,T,D_v]; query_positions [B,M] and
    key_positions [B,H_kv,T] are original positions, which causality compares, -1 = padding, empty slot. packed: every
    query sees every slot; positions and sliding_window are not read. sinks [H_q]: a logit per query head that takes its
    share of the softmax and adds nothing to the output. weights: return them. sums [B,H_kv,T,G or 1] float32: what each
    slot drew from the queries is added there in place, per query head or as the mean over a group. bias [B,H_kv,T]
    float32: added to the logits of a slot, behind the soft cap.
    CUDA: Triton, ValueError without it. CPU, float64: the reference.
    """
    attend = decode_attention_triton if use_triton(queries) else decode_attention_ref
    return attend(
        queries, keys, values, query_positions, key_positions, scaling, softcap, sliding_window, sinks, packed,
        weights, sums, bias=bias,
    )  # fmt: skip

# ruff: noqa: N803 - in kernels, sizes have their names in shapes
"""One decoding step over tokens that are stored as codes: attention that dequantizes in registers, and the encoder.

A launch of `decode_codes` reads codes and scales of a tile of tokens, converts them to numbers and attends, so that
no dequantized tensor is written; `join` joins the parts. The newest token is exact in its own step: its slot is
replaced by its key and value. `append_codes` encodes the new tokens of all sequences in one launch. Nothing depends on
the host, so that CUDA graphs can record both.

Shapes: B batch, H KV heads, G query heads per KV head, N flat slots of all segments, T slots of a tile, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.code_formats import Coded, encode, numbers_of, rotated, table_words
from kvbench.kernels.decode import SLOTS_A_PART
from kvbench.kernels.devices import multipliable, programs_at_once
from kvbench.kernels.join import join
from kvbench.kernels.references import NewTokens
from kvbench.kernels.tiles import (
    View,
    at_head,
    attend,
    capped,
    fit_heads,
    in_sight,
    jit,
    next_power_of_two,
    parts_of,
    product_of,
    require_triton,
    rule_of,
    slots_of_a_part,
    store_part,
    tl,
    view,
    with_sinks,
)


@partial(jit, varying=("each",))
def _attend_codes(
    q: View, q_pos_ptr: tl.tensor, k_pos_ptr: tl.tensor, starts_ptr: tl.tensor, counts_ptr: tl.tensor,
    k_codes: tl.tensor, k_scale: tl.tensor, k_table: tl.tensor, v_codes: tl.tensor, v_scale: tl.tensor,
    v_table: tl.tensor, new_k: View, new_v: View, new_slots_ptr: tl.tensor, sinks_ptr: tl.tensor, out_ptr: tl.tensor,
    lse_ptr: tl.tensor, H: tl.tensor, each: tl.tensor, scale: tl.tensor, cap: tl.tensor, window: tl.tensor,
    k_factor: tl.tensor, v_factor: tl.tensor, KEY: tl.constexpr, VALUE: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr, PRODUCTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: `each` slots of one KV head, for the newest query of all its query heads.

    The first part of a segment includes the sinks, so that it is stored even if the segment is empty.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length = tl.load(starts_ptr + row).to(tl.int64), tl.load(counts_ptr + row).to(tl.int32)
    begin = part * each
    if begin >= tl.maximum(length, 1):
        return
    end = tl.minimum(begin + each, length)
    newest = tl.load(q_pos_ptr + row // H).to(tl.int32)
    heads = tl.arange(0, ROWS)
    dims, value_dims = tl.arange(0, KEY.BLOCK_D), tl.arange(0, VALUE.BLOCK_D)
    at = at_head(q, row * G, H * G) + heads[:, None] * q.head + dims[None, :] * q.dim
    query = tl.load(at, mask=(heads < G)[:, None] & (dims < KEY.D)[None, :], other=0.0)
    slot = tl.load(new_slots_ptr + row).to(tl.int32)  # the newest token is exact
    slot = tl.where(newest >= 0, slot, -1)
    exact = (slot + heads * 0 >= begin) & (slot + heads * 0 < end)
    here = (slot + value_dims * 0 >= begin) & (slot + value_dims * 0 < end)
    k = tl.load(at_head(new_k, row, H) + dims * new_k.dim, mask=dims < KEY.D, other=0.0)
    v = tl.load(at_head(new_v, row, H) + value_dims * new_v.dim, mask=(value_dims < VALUE.D) & here, other=0.0)
    own = tl.sum(query.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    top = tl.where(exact, capped(own, cap), float("-inf"))
    total = tl.where(exact, 1.0, 0.0)
    # Sums are of numbers without their factor; the exact value is divided by it instead.
    out = (heads * 0.0)[:, None] + (v.to(tl.float32) / v_factor)[None, :]
    query = query.to(PRODUCTS)
    k_words, v_words = table_words(k_table, KEY, PRODUCTS), table_words(v_table, VALUE, PRODUCTS)
    for step in range(tl.cdiv(end - begin, BLOCK_T)):
        slots = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)
        wide, place = start + slots, slots
        seen = (slots < end) & (slots != slot)
        if k_pos_ptr is not None:
            place = tl.load(k_pos_ptr + wide, mask=seen, other=-1).to(tl.int32)
        seen = seen & in_sight(place, newest, newest, window)
        keys = numbers_of(k_codes, k_scale, k_words, wide, seen, KEY, PRODUCTS)
        values = numbers_of(v_codes, v_scale, v_words, wide, seen, VALUE, PRODUCTS)
        logits = product_of(query, tl.trans(keys)) * (scale * k_factor)
        logits = tl.where(seen[None, :], capped(logits, cap), float("-inf"))
        top, total, out = attend(logits, values, top, total, out)
    out *= v_factor
    if sinks_ptr is not None:
        top, total, out = with_sinks(top, total, out, sinks_ptr, row % H * G + heads, heads < G, part)
    places = (row * tl.num_programs(1) + part) * G + heads
    store_part(out_ptr, lse_ptr, places, heads < G, top, total, out, value_dims, VALUE.D)


def tiles(dim: int, dtype: torch.dtype, table: bool) -> dict[str, Any]:
    """Tokens of a tile and launch options. Products of 16-bit models are of float16 numbers, summed in float32.

    table: numbers are loaded from a table in memory, which is staged in shared memory too, 32 KiB a stage.
    """
    if dtype == torch.float32:
        return {"BLOCK_T": 16, "PRODUCTS": tl.float32, "num_warps": 8, "num_stages": 2, "maxnreg": 255}
    sizes = {"BLOCK_T": 64, "num_warps": 4} if dim <= 128 else {"BLOCK_T": 32, "num_warps": 8}
    return {**sizes, "PRODUCTS": tl.float16, "num_stages": 2 if table else 3}


@torch.no_grad()
def decode_codes(
    queries: Tensor, keys: Coded, values: Coded, new_tokens: NewTokens, positions: tuple[Tensor, Tensor | None],
    segments: tuple[Tensor, Tensor], most: int, how: tuple[float, float | None, int | None, Tensor | None],
    dtype: torch.dtype, rotation: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention [B,H_q,1,D] of the newest queries over segments of codes: `decode_attention_flat` on codes.

    new_tokens: the exact tokens of this step, whose slots [B,H] (-1: none) are not read from codes. positions: of
    queries [B,1] and slots [N]; None: slots of a segment are positions. segments: starts and counts [B,H], each at
    most `most`. how: scaling, softcap, sliding_window, sinks. dtype: of the model, if queries are wider. rotation
    [D,D]: by which the output is multiplied. Raises ValueError without Triton.
    """
    require_triton("decode_codes", queries.device)
    fit_heads("decode_codes", keys.dim, values.dim)
    (batch, query_heads), heads, rule = queries.shape[:2], segments[0].shape[1], rule_of(*how[:3])
    key, value, group = keys.layout, values.layout, query_heads // heads
    queries, new_keys, new_values = multipliable(queries, new_tokens.keys, new_tokens.values)
    new_tokens = NewTokens(new_keys, new_values, new_tokens.slots)
    table = key.KIND == "table" and key.PERMUTE is None
    sizes = tiles(max(key.BLOCK_D, value.BLOCK_D), dtype, table)
    pairs = batch * heads
    each = slots_of_a_part(pairs, most, sizes["BLOCK_T"], programs_at_once(queries.device), SLOTS_A_PART)
    parts = max(1, -(-most // each))
    part_out, part_lse = parts_of(queries, parts, heads, values.dim)
    starts, counts = (x.contiguous() for x in segments)
    with torch.cuda.device_of(queries):
        _attend_codes[pairs, parts](
            view(queries), positions[0].contiguous(), positions[1], starts, counts,
            *keys.memory, *values.memory, view(new_tokens.keys), view(new_tokens.values),
            new_tokens.slots.contiguous(), how[3], part_out, part_lse, heads, each, rule.scale,
            rule.cap, rule.window, keys.factor, values.factor, KEY=key, VALUE=value, G=group,
            ROWS=max(16, next_power_of_two(group)), **sizes,
        )  # fmt: skip
        return join(part_out, part_lse, queries, heads, most, each, counts, rotation, dtype)[0]


@jit
def _store(ptr: tl.tensor, head: tl.tensor, x: tl.tensor, rotation: View, HOW: tl.constexpr) -> None:
    """Store the rotated vector of a head."""
    if rotation is not None:
        dims = tl.arange(0, HOW.BLOCK_D)
        tl.store(ptr + head * HOW.D + dims, x, mask=dims < HOW.D)


@jit
def _count_beyond(ptr: tl.tensor, row: tl.tensor, x: tl.tensor, limit: tl.tensor) -> None:
    """Add the number of elements of x beyond the limit to the count of a row."""
    if ptr is not None:
        tl.atomic_add(ptr + row, tl.sum((tl.abs(x) > limit).to(tl.int64), 0))


@jit
def _append_codes(
    starts_ptr: tl.tensor, slots_ptr: tl.tensor, new_k: View, new_v: View, k_codes: tl.tensor, k_scale: tl.tensor,
    k_table: tl.tensor, v_codes: tl.tensor, v_scale: tl.tensor, v_table: tl.tensor, H: tl.tensor, k_factor: tl.tensor,
    v_factor: tl.tensor, queries: View, rotation: View, rotated_ptr: tl.tensor, clipped_ptr: tl.tensor,
    k_limit: tl.tensor, v_limit: tl.tensor, KEY: tl.constexpr, VALUE: tl.constexpr, G: tl.constexpr,
    LEAST: tl.constexpr, LEVELS: tl.constexpr, TRUNCATED: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the new key, or value, of one KV head; or, with a rotation, one of its queries.

    Rotated vectors are stored too, those of all heads of a sequence one after another: queries, keys, values.
    """
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(starts_ptr + row).to(tl.int64) + tl.load(slots_ptr + row).to(tl.int64)
    first = rotated_ptr + row // H * H * (G + 2) * KEY.D  # with a rotation, keys and values are of one size
    if which == 0:
        k = rotated(at_head(new_k, row, H), new_k.dim, rotation, KEY.D, KEY.BLOCK_D)
        encode(k, k_codes, k_scale, k_table, k_factor, place, KEY, LEAST, LEVELS, TRUNCATED)
        _count_beyond(clipped_ptr, row // H, k, k_limit)
        _store(first, H * G + row % H, k, rotation, KEY)
    elif which == 1:
        v = rotated(at_head(new_v, row, H), new_v.dim, rotation, VALUE.D, VALUE.BLOCK_D)
        encode(v, v_codes, v_scale, v_table, v_factor, place, VALUE, LEAST, LEVELS, TRUNCATED)
        _count_beyond(clipped_ptr, row // H, v, v_limit)
        _store(first, H * G + H + row % H, v, rotation, VALUE)
    else:
        head = row % H * G + which - 2
        at = queries.ptr + row // H * queries.batch + head * queries.head
        _store(first, head, rotated(at, queries.dim, rotation, KEY.D, KEY.BLOCK_D), rotation, KEY)


def append_codes(
    keys: Coded, values: Coded, starts: Tensor, new_tokens: NewTokens, queries: Tensor, rotation: Tensor | None = None,
    clipped: tuple[Tensor, float, float] | None = None,
) -> tuple[Tensor, NewTokens]:  # fmt: skip
    """Encode new tokens [B,H,1,D] into their slots [B,H] of segments at `starts` [B,H], in place.

    rotation [D,D]: by which tokens are multiplied before, and queries [B,H_q,1,D] too. clipped: counts [B] int64 of the
    numbers of keys and values beyond two limits, which are added up. Returns queries and tokens after the rotation, in
    float32.
    """
    require_triton("append_codes", starts.device)
    tokens, (batch, heads), form = [queries, new_tokens.keys, new_tokens.values], starts.shape, keys.format
    group = queries.shape[1] // heads
    whole = queries.new_empty(batch, heads * (group + 2), 1, keys.dim, dtype=torch.float32)
    asked, *new = map(view, multipliable(*tokens))
    matrix = None if rotation is None else View(rotation, 0, 0, *rotation.stride())
    with torch.cuda.device_of(starts):
        _append_codes[starts.numel(), 2 if rotation is None else 2 + group](
            starts.contiguous(), new_tokens.slots.contiguous(), *new, *keys.memory, *values.memory, heads, keys.factor,
            values.factor, asked, matrix, whole, *(clipped or (None, 0.0, 0.0)), KEY=keys.layout, VALUE=values.layout,
            G=group, LEAST=form.least, LEVELS=form.levels, TRUNCATED=form.truncated,
            num_warps=1 if rotation is None else 4,
        )  # fmt: skip
    if rotation is None:
        return queries, new_tokens
    wide, k, v = whole.split([heads * group, heads, heads], dim=1)
    return wide, NewTokens(k, v, new_tokens.slots)

# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""One decoding step over tokens that are coded in groups, with the newest tokens exact in a ring.

Every KV head of every sequence has a segment of slots for its coded tokens, as in `decode_attention_flat`; codes of U
tokens together are one entry. The ring has fixed addresses: a new token displaces the oldest one,
whose value `append_groups` encodes, if values are coded token by token. One launch of `decode_groups` attends to codes
and ring, and `join` joins its parts. Lengths are on the device, so that CUDA graphs can record both.

Shapes: B batch, H KV heads, G query heads per KV head, N flat slots of all segments, E places of a ring, U numbers of a
group, W int32 words of a group, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.code_formats import nearest
from kvbench.kernels.decode import SLOTS_A_PART
from kvbench.kernels.devices import multipliable, programs_at_once
from kvbench.kernels.group_formats import Codes, Form, channels, coded, layout, places, tiles
from kvbench.kernels.join import join
from kvbench.kernels.references import NewTokens
from kvbench.kernels.tiles import (
    Rule,
    View,
    at_head,
    attend,
    capped,
    empty_part,
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


class FlatCodes(NamedTuple):
    """Codes of keys or values, x = code * scale + minimum: words [m,.] int32, scale and minimum [m,.].

    An entry has the codes of a token, or of a group of tokens; segments of slots start at whole entries.
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor
    form: Form

    @property
    def views(self) -> Codes:
        """The codes as arguments of a kernel: `row` is the stride of an entry."""
        return Codes(*(View(x, 0, 0, x.stride(0), 0) for x in (self.words, self.scale, self.minimum)))


class Ring(NamedTuple):
    """Exact keys [B,H,E,D] and values [B,H,E,D_v] at positions [B,H,E] int32, -1 = empty."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@jit
def _of_segment(codes: Codes, start: tl.tensor, HOW: tl.constexpr) -> Codes:
    """The codes of a segment."""
    words, scale, minimum = codes.words, codes.scale, codes.minimum
    entry = start if HOW.PER_TOKEN else start // HOW.U
    return Codes(
        View(words.ptr + entry * words.row, 0, 0, words.row, 0),
        View(scale.ptr + entry * scale.row, 0, 0, scale.row, 0),
        View(minimum.ptr + entry * minimum.row, 0, 0, minimum.row, 0),
    )


@partial(jit, varying=("each",))
def _attend_groups(
    q: View, q_pos_ptr: tl.tensor, k_pos_ptr: tl.tensor, starts_ptr: tl.tensor, counts_ptr: tl.tensor, keys: Codes,
    values: Codes, ring_k: View, ring_v: View, ring_pos: View, sinks_ptr: tl.tensor, out_ptr: tl.tensor,
    lse_ptr: tl.tensor, H: tl.tensor, E: tl.tensor, each: tl.tensor, rule: Rule, KEY: tl.constexpr,
    VALUE: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRODUCTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the ring of one KV head and its sinks (part 0), or the tokens of `each` words of its codes."""
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part, parts = tl.program_id(1), tl.num_programs(1)
    start, count = tl.load(starts_ptr + row).to(tl.int64), tl.load(counts_ptr + row).to(tl.int32)
    words = tl.cdiv(count, KEY.U) * KEY.WIDTH
    begin = (part - 1) * each
    heads = tl.arange(0, ROWS)
    stored = (row * parts + part) * G + heads
    if (part > 0) & (begin >= words):
        tl.store(lse_ptr + stored, heads * 0.0 + float("-inf"), mask=heads < G)
        return
    newest = tl.load(q_pos_ptr + row // H).to(tl.int32)
    dims, there = channels(VALUE)
    top, total, out = empty_part(ROWS, dims.shape[0])
    key_dims = tl.arange(0, KEY.BLOCK_D)
    at = at_head(q, row * G, H * G) + heads[:, None] * q.head + key_dims[None, :] * q.dim
    query = tl.load(at, mask=(heads < G)[:, None] & (key_dims < KEY.D)[None, :], other=0.0)
    for step in range(tl.where(part == 0, tl.cdiv(E, TILE), 0)):
        slots = step * TILE + tl.arange(0, TILE)
        place = tl.load(at_head(ring_pos, row, H) + slots, mask=slots < E, other=-1)
        seen = in_sight(place, newest, newest, rule.window)
        own = slots.to(tl.int64)[:, None]
        k = tl.load(
            at_head(ring_k, row, H) + own * ring_k.row + key_dims[None, :],
            mask=seen[:, None] & (key_dims < KEY.D)[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            at_head(ring_v, row, H) + own * ring_v.row + dims[None, :], mask=seen[:, None] & there[None, :], other=0.0
        )
        logits = capped(product_of(query, tl.trans(k)) * rule.scale, rule.cap)
        top, total, out = attend(tl.where(seen[None, :], logits, float("-inf")), v, top, total, out)
    if sinks_ptr is not None:
        top, total, out = with_sinks(top, total, out, sinks_ptr, row % H * G + heads, heads < G, part)

    numbers = (query.to(tl.float32) * rule.scale).to(PRODUCTS)
    keys, values = _of_segment(keys, start, KEY), _of_segment(values, start, VALUE)
    steps = tl.cdiv(tl.minimum(begin + each, words) - begin, KEY.WORDS)
    for step in range(tl.where(part == 0, 0, steps)):
        first = begin + step * KEY.WORDS
        tokens, placed = places(first, KEY.WORDS, KEY)
        k = coded(keys, first, tokens, count, KEY, PRODUCTS)
        v = coded(values, first, tokens, count, VALUE, PRODUCTS)
        place = tl.load(k_pos_ptr + start + tokens, mask=placed & (tokens < count), other=-1)
        seen = in_sight(place, newest, newest, rule.window)
        if not VALUE.PER_TOKEN:
            v = tl.trans(v)
        logits = capped(product_of(numbers, k), rule.cap)
        top, total, out = attend(tl.where(seen[None, :], logits, float("-inf")), v, top, total, out)
    dims = tl.where(there, dims, VALUE.D)  # the padding of a group is not stored
    store_part(out_ptr, lse_ptr, stored, heads < G, top, total, out, dims, VALUE.D)


@torch.no_grad()
def decode_groups(
    queries: Tensor, keys: FlatCodes, values: FlatCodes, ring: Ring, positions: tuple[Tensor, Tensor],
    segments: tuple[Tensor, Tensor], most: int, how: tuple[float, float | None, int | None, Tensor | None],
) -> Tensor:  # fmt: skip
    """Attention [B,H_q,1,D_v] of the newest queries [B,H_q,1,D] over segments of codes and the tokens of the ring.

    positions: of queries [B,1] and slots [N] int32, -1: not read from codes. segments: starts and counts [B,H],
    each at most `most`. how: scaling, softcap, sliding_window, sinks. Keys are coded per channel, and so may be
    values, in the same groups. Raises ValueError without Triton.
    """
    require_triton("decode_groups", queries.device)
    dim, value_dim = keys.form.dim, values.form.dim
    fit_heads("decode_groups", dim, value_dim)
    (batch, query_heads), heads, kept = queries.shape[:2], segments[0].shape[1], queries.dtype
    queries, ring_keys, ring_values = multipliable(queries, ring.keys, ring.values)
    ring = Ring(ring_keys, ring_values, ring.positions)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    sizes: dict[str, Any] = tiles(dim, value_dim, queries.dtype)
    room = 512 if max(dim, value_dim) <= 128 else 256  # more would spill, or exceed the shared memory
    most_tokens = 16 if sizes["PRODUCTS"] == tl.float32 else room // max(4, keys.form.bits)
    tokens = min(sizes.pop("tokens"), most_tokens)
    key, value = layout(keys.form, tokens), layout(values.form, tokens)
    group, whole, pairs = query_heads // heads, -(-most // key.U) * key.WIDTH, batch * heads
    each = slots_of_a_part(
        pairs, whole, key.WORDS, programs_at_once(queries.device), max(key.WORDS, SLOTS_A_PART * key.BITS // 32)
    )
    part_out, part_lse = parts_of(queries, parts := 1 + -(-whole // each), heads, value_dim)
    with torch.cuda.device_of(queries):
        _attend_groups[pairs, parts](
            view(queries), positions[0].contiguous(), positions[1], *(x.contiguous() for x in segments),
            keys.views, values.views, view(ring.keys), view(ring.values), view(ring.positions), how[3], part_out,
            part_lse, heads, ring.positions.shape[-1], each, rule_of(*how[:3]), KEY=key,
            VALUE=value, G=group, ROWS=max(16, next_power_of_two(group)),
            TILE=32 if sizes["PRODUCTS"] == tl.float16 else 16, **sizes,
        )  # fmt: skip
        return join(part_out, part_lse, queries, heads, parts, 1)[0].to(kept)


@jit
def _append_groups(
    new_k: View, new_v: View, ring_k: View, ring_v: View, starts_ptr: tl.tensor, places_ptr: tl.tensor,
    gone_ptr: tl.tensor, values: Codes, H: tl.tensor, VALUE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the new key of a KV head, or its new value after the value that it displaces."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        k = tl.load(at_head(new_k, row, H) + dims * new_k.dim, mask=dims < D)
        tl.store(at_head(ring_k, row, H) + place * ring_k.row + dims, k, mask=dims < D)
    else:
        at = at_head(ring_v, row, H) + place * ring_v.row
        if VALUE.PER_TOKEN:
            PER_WORD: tl.constexpr = 32 // VALUE.BITS
            WIDTH: tl.constexpr = VALUE.WIDTH
            gone = tl.load(gone_ptr + row).to(tl.int64)
            start = tl.load(starts_ptr + row).to(tl.int64)
            group, number = tl.arange(0, GROUPS), tl.arange(0, WIDTH * PER_WORD)
            exists = (group * VALUE.U < VALUE.D) & (gone + group * 0 >= 0)
            inside = exists[:, None] & (number < VALUE.U)[None, :]
            x = tl.load(at + group[:, None] * VALUE.U + number[None, :], mask=inside, other=0.0).to(tl.float32)
            low = tl.where(exists, tl.min(tl.where(inside, x, float("inf")), 1), 0.0)
            high = tl.where(exists, tl.max(tl.where(inside, x, float("-inf")), 1), 0.0)
            LEVELS: tl.constexpr = (1 << VALUE.BITS) - 1
            held_in = values.scale.ptr.dtype.element_ty  # type: ignore[attr-defined]
            scale = tl.math.div_rn(high - low, LEVELS + low * 0).to(held_in)
            low = low.to(held_in)
            step = scale.to(tl.float32)[:, None] + x * 0
            step = tl.where(step == 0, float("inf"), step)
            codes = nearest(tl.math.div_rn(x - low.to(tl.float32)[:, None], step))
            codes = tl.where(inside, tl.minimum(tl.maximum(codes, 0.0), LEVELS), 0.0).to(tl.int32)
            codes = tl.reshape(codes, (GROUPS, WIDTH, PER_WORD))
            packed = tl.sum(codes << (tl.arange(0, PER_WORD) * VALUE.BITS)[None, None, :], 2)
            word, slot = tl.arange(0, WIDTH), start + gone
            own = values.words.ptr + slot * values.words.row + group[:, None] * VALUE.W + word[None, :]
            tl.store(own, packed, mask=exists[:, None] & (word < VALUE.W)[None, :])
            tl.store(values.scale.ptr + slot * values.scale.row + group, scale, mask=exists)
            tl.store(values.minimum.ptr + slot * values.minimum.row + group, low, mask=exists)
        v = tl.load(at_head(new_v, row, H) + dims * new_v.dim, mask=dims < VALUE.D)
        tl.store(at + dims, v, mask=dims < VALUE.D)


def append_groups(values: FlatCodes, ring: Ring, starts: Tensor, new_tokens: NewTokens, gone: Tensor) -> None:
    """Write new tokens [B,H,1,D] to their places [B,H] of the ring, in place.

    gone [B,H]: the slots of their segments at `starts` [B,H] for the displaced values, which are encoded; -1: none.
    """
    require_triton("append_groups", starts.device)
    dim, form = ring.keys.shape[-1], values.form
    with torch.cuda.device_of(starts):
        _append_groups[starts.numel(), 2](
            view(new_tokens.keys), view(new_tokens.values), view(ring.keys), view(ring.values), starts.contiguous(),
            new_tokens.slots.contiguous(), gone.contiguous(), values.views, starts.shape[1], VALUE=layout(form, 32),
            D=dim, BLOCK=next_power_of_two(max(dim, form.dim)), GROUPS=next_power_of_two(-(-form.dim // form.unit)),
            num_warps=1,
        )  # fmt: skip

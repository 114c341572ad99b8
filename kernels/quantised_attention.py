# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of one new query per sequence on packed codes, a tail in full precision and exact outlier tokens.

Tokens are split over programs (flash-decoding, Dao et al. 2023); a second launch joins the parts by their log-sum-exp.
A program unpacks a tile of tokens in registers and goes on as attention does: no dequantised tensor is ever written.
Keys and values are each in groups of tokens (one channel) or of channels (one token).

Shapes: B batch, H KV heads, G query heads per KV head, N tokens in codes, R tokens of a tail, E outlier entries, U
numbers of a group, W int32 words of a group, T tokens of a tile, D head dim of keys, D_v of values.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.decode_attention import programs_at_once
from kvbench.kernels.decode_tile import store_part
from kvbench.kernels.jit import View, at_head, fit_heads, jit, next_power_of_two, require_triton, rows, tl, view
from kvbench.kernels.join_splits import Parts, finish
from kvbench.kernels.packed import Packed, Side
from kvbench.kernels.prompt_tiles import Rule, rule_of
from kvbench.kernels.quantised_tiles import Groups, Stored, attended, channels, coded, held, of_side, places

MOST_SPLITS = 128
ROWS = 16  # query heads of a KV head, filled up: the fewest rows tensor cores take


class Outliers(NamedTuple):
    """Exact keys [B,H,E,D] and values [B,H,E,D_v] that stand in for the tokens at slots [B,H,E] int32; -1 = empty."""

    keys: Tensor
    values: Tensor
    slots: Tensor


class Attention(NamedTuple):
    """out [B,H_q,1,D_v] in the queries' dtype; log_sum_exp [B,H_q,1] float32, natural. A query at -1: 0 and -inf."""

    out: Tensor
    log_sum_exp: Tensor


def quantised_attention_ref(
    queries: Tensor,
    query_positions: Tensor,
    keys: Side,
    values: Side,
    scaling: float,
    softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:
    """The definition: dequantise, put the outliers in their places, attend in float32."""
    k, v = (_in_order(side) for side in (keys, values))
    seen = torch.arange(k.shape[2], device=k.device) < keys.lengths()[..., None]  # [B,H,C]
    if outliers is not None:
        for b, h, e in (outliers.slots >= 0).nonzero().tolist():
            slot = outliers.slots[b, h, e]
            k[b, h, slot], v[b, h, slot] = outliers.keys[b, h, e].float(), outliers.values[b, h, e].float()
    batch, query_heads, new, dim = queries.shape
    rows = queries.float().reshape(batch, k.shape[1], -1, dim)
    logits = rows @ k.transpose(-1, -2) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~(seen & (query_positions >= 0)[..., None])[:, :, None], -torch.inf)
    log_sum_exp = logits.logsumexp(-1)
    out = (logits - log_sum_exp[..., None]).exp().nan_to_num(0.0) @ v
    return Attention(out.view(batch, query_heads, new, -1).to(queries.dtype), log_sum_exp.view(batch, query_heads, new))


def _in_order(side: Side) -> Tensor:
    """[B,H,C,D] float32: each head's codes, then its tail, closed up; 0 beyond."""
    coded, tail = side.packed.dequantised(), side.tail.float()
    x = tail.new_zeros(*tail.shape[:2], int(side.lengths().max()), tail.shape[3])
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in tail.shape[:2])).view(-1, 2).tolist():
        first, last = int(side.coded()[b, h]), int(side.lengths()[b, h])
        x[b, h, :first] = coded[b, h, :first]
        x[b, h, first:last] = tail[b, h, : last - first]
    return x


@jit
def _scaled(
    q: View, row: tl.tensor, H: tl.tensor, heads: tl.tensor, scale: tl.tensor, KEY: tl.constexpr, G: tl.constexpr
) -> tl.tensor:
    """The queries of KV head `row`, [heads,channels of a tile of its keys], times `scale`."""
    dims, there = channels(KEY)
    at = at_head(q, row * G, H * G) + heads[:, None] * q.head + dims[None, :]
    return tl.load(at, mask=(heads < G)[:, None] & there[None, :], other=0.0).to(tl.float32) * scale


@jit
def _among(tokens: tl.tensor, slots_ptr: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Which of the tokens are outliers: one of the E at slots_ptr after the other, which takes few registers."""
    found = tokens < 0
    for entry in range(E):
        found = found | (tokens == tl.load(slots_ptr + entry))
    return found


@jit
def _but_outliers(
    seen: tl.tensor, tokens: tl.tensor, first: tl.tensor, slots_ptr: tl.tensor, TOKENS: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which of a tile's tokens are seen and no outliers; few tiles have any."""
    entries = tl.arange(0, BLOCK_E)
    outliers = tl.load(slots_ptr + entries, mask=entries < E, other=-1)
    past = (first + TOKENS.WORDS + TOKENS.WIDTH - 1) // TOKENS.WIDTH * TOKENS.U
    near = (outliers >= first // TOKENS.WIDTH * TOKENS.U) & (outliers < past)
    if tl.max(near.to(tl.int32), 0) > 0:
        seen = seen & ~_among(tokens, slots_ptr, E)
    return seen


@jit
def _mixed(
    keys: Stored,
    values: Stored,
    first: tl.tensor,
    slots_ptr: tl.tensor,
    key_coded: tl.tensor,
    value_coded: tl.tensor,
    length: tl.tensor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    E: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys, values and who is seen of a tile of codes, tail and outliers, which stand behind the last token."""
    tokens, placed = places(first, TOKENS.REST, TOKENS)
    seen, entry, inside = placed & (tokens < length), tokens - length, placed
    if E > 0:
        inside = placed & (entry >= 0) & (entry < E)
        inside = inside & (tl.load(slots_ptr + entry, mask=inside, other=-1) >= 0)
    k = held(keys, first, tokens, seen, key_coded, entry, inside, KEY, TOKENS.REST, E, PRODUCTS)
    v = held(values, first, tokens, seen, value_coded, entry, inside, VALUE, TOKENS.REST, E, PRODUCTS)
    if E > 0:
        seen = (seen & ~_among(tokens, slots_ptr, E)) | inside
    return k, v, seen


@jit
def _lengths(
    ptr: tl.tensor, row: tl.tensor, key_coded: tl.tensor, value_coded: tl.tensor, length: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A KV head's tokens: keys in codes, values in codes, all; where heads differ, from ptr [3,B*H]."""
    if ptr is not None:
        key_coded = tl.load(ptr + row)
        value_coded = tl.load(ptr + tl.num_programs(0) + row)
        length = tl.load(ptr + 2 * tl.num_programs(0) + row)
    return key_coded, value_coded, length


@partial(jit, varying=("key_coded", "value_coded", "length"))
def _attend_codes(
    q: View,
    q_pos_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    keys: Stored,
    values: Stored,
    H: tl.tensor,
    key_coded: tl.tensor,
    value_coded: tl.tensor,
    length: tl.tensor,
    rule: Rule,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRODUCTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: every num_programs(1)-th tile of one KV head's tokens, then of those not in codes and outliers.

    Tokens are in the order of TOKENS, the groups of a side per channel: WORDS, then REST, of its words are a tile.
    """
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part, parts = tl.program_id(1), tl.num_programs(1)
    key_coded, value_coded, length = _lengths(lengths_ptr, row, key_coded, value_coded, length)
    asked = tl.load(q_pos_ptr + row // H) >= 0  # a padded sequence asks nothing
    heads = tl.arange(0, ROWS)
    numbers = _scaled(q, row, H, heads, rule.scale, KEY, G).to(PRODUCTS)
    keys, values = of_side(keys, row, H), of_side(values, row, H)
    if E > 0:
        slots_ptr += row * E
    dims, there = channels(VALUE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, dims.shape[0]], tl.float32)
    whole = tl.minimum(key_coded, value_coded) // TOKENS.U * TOKENS.WIDTH // TOKENS.WORDS  # tiles of nothing but codes
    for tile in tl.range(part, tl.where(asked, whole, 0), parts, num_stages=STAGES):
        first = tile * TOKENS.WORDS
        tokens, seen = places(first, TOKENS.WORDS, TOKENS)
        k = coded(keys, first, tokens, key_coded, KEY, TOKENS.WORDS, PRODUCTS)
        v = coded(values, first, tokens, value_coded, VALUE, TOKENS.WORDS, PRODUCTS)
        if E > 0:
            seen = _but_outliers(seen, tokens, first, slots_ptr, TOKENS, E, BLOCK_E)
        top, total, out = attended(numbers, k, v, seen, top, total, out, rule.cap, KEY, VALUE)
    behind = whole * TOKENS.WORDS
    tiles = tl.cdiv(tl.cdiv(length + E, TOKENS.U) * TOKENS.WIDTH - behind, TOKENS.REST)
    for tile in range(part, tl.where(asked, tiles, 0), parts):
        first = behind + tile * TOKENS.REST
        k, v, seen = _mixed(
            keys, values, first, slots_ptr, key_coded, value_coded, length, KEY, VALUE, TOKENS, E, PRODUCTS
        )
        top, total, out = attended(numbers, k, v, seen, top, total, out, rule.cap, KEY, VALUE)
    dims = tl.where(there, dims, VALUE.D)  # what fills a group up is stored nowhere
    store_part(out_ptr, lse_ptr, (row * parts + part) * G + heads, heads < G, top, total, out, dims, VALUE.D)


def tiles(dim: int, value_dim: int, dtype: torch.dtype, outliers: bool) -> dict[str, Any]:
    """Tokens of a tile, and of one whose tokens are not all codes; launch options: see the table in docs/kernels.md."""
    wide = max(dim, value_dim) > 128
    if dtype == torch.float32:
        return {"tokens": 16 if wide else 32, "rest": 16, "PRODUCTS": tl.float32, "STAGES": 1, "num_warps": 8}
    sizes = {"tokens": 64, "rest": 16} if outliers else {"tokens": 64 if wide else 128, "rest": 32}
    registers = 128 if max(dim, value_dim) <= 64 and not outliers else 255  # left alone, ptxas spills a few
    return {**sizes, "PRODUCTS": tl.float16, "STAGES": 2, "num_warps": 8 if wide else 4, "maxnreg": registers}


def quantised_attention_triton(
    queries: Tensor,
    query_positions: Tensor,
    keys: Side,
    values: Side,
    scaling: float,
    softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:
    """Attention of one query per sequence in up to two launches.

    queries [B,H_q,1,D], query_positions [B,1] (-1: padding). Every token held is in view of the query. float32 queries:
    products in float32; others: of float16 numbers, summed in float32. Where both sides are per channel, in groups of
    one size. ValueError where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    require_triton("quantised_attention", queries.device)
    (batch, query_heads, new, dim), kept = queries.shape, queries.dtype
    assert new == 1, "one query per sequence"
    heads, value_dim = values.tail.shape[1], values.tail.shape[3]
    fit_heads("quantised_attention", dim, value_dim)
    if not queries.is_cuda and kept == torch.bfloat16:
        queries = queries.float()  # Triton's interpreter multiplies the bit patterns of bfloat16
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    how = tiles(dim, value_dim, queries.dtype, outliers is not None)
    key, value, tokens = _layout(keys.packed, values.packed, (dim, value_dim), how.pop("tokens"), how.pop("rest"))
    stored = (_stored(side, exact) for side, exact in zip((keys, values), outliers or (None, None), strict=False))
    slots = None if outliers is None else outliers.slots.contiguous()
    entries = 0 if slots is None else slots.shape[2]
    lengths = None
    if not (keys.even and values.even):
        lengths = torch.stack([keys.coded(), values.coded(), keys.lengths()]).to(torch.int32).contiguous()
    longest, group = keys.packed.tokens + keys.tail.shape[2], query_heads // heads
    blocks = -(-(-(-(longest + entries) // tokens.U) * tokens.WIDTH) // tokens.WORDS)
    parts = splits_for(batch * heads, blocks, programs_at_once(queries.device))
    part_out = queries.new_empty(batch * heads * parts, group, value_dim, dtype=torch.float32)
    part_lse = part_out.new_empty(part_out.shape[:2])
    with torch.cuda.device_of(queries):
        _attend_codes[batch * heads, parts](
            view(queries), query_positions.contiguous(), slots, lengths, part_out, part_lse, *stored,
            heads, keys.packed.tokens, values.packed.tokens, longest, rule_of(scaling, softcap),
            KEY=key, VALUE=value, TOKENS=tokens, G=group, E=entries, ROWS=max(ROWS, next_power_of_two(group)),
            BLOCK_E=next_power_of_two(max(entries, 1)), **how,
        )  # fmt: skip
        out, log_sum_exp = finish(Parts(part_out, part_lse, parts), queries, heads, queries.dtype)
    return Attention(out.to(kept), log_sum_exp)


@lru_cache(maxsize=4096)
def splits_for(programs: int, blocks: int, at_once: int) -> int:
    """Into how many parts the `blocks` tiles of a KV head are split, of which a device runs `at_once` together.

    The fewest whose longest chain of tiles, one wave of programs after another, is within 1/16 of the shortest.
    """

    def chain(splits: int) -> int:
        return -(-programs * splits // at_once) * -(-blocks // splits)

    choices = range(1, max(1, min(blocks, MOST_SPLITS)) + 1)
    shortest = min(map(chain, choices))
    return next(splits for splits in choices if 16 * chain(splits) <= 17 * shortest)


def _layout(
    keys: Packed, values: Packed, dims: tuple[int, int], tokens: int, rest: int
) -> tuple[Groups, Groups, Groups]:
    """How keys, values and tokens lie in words; a tile has `tokens` of these, or `rest` where not all are codes."""
    sides = []
    order = Groups(False, 32, tokens, tokens, tokens)  # in order will do
    for packed, dim in zip((keys, values), dims, strict=True):
        words = packed.words.shape[-1]
        own = Groups(packed.per_token, packed.bits, packed.unit, words, next_power_of_two(words))
        if packed.per_token:
            least = 16 * packed.bits // 32  # a product takes 16 channels
            own = own._replace(WORDS=max(next_power_of_two(packed.words.shape[3]) * own.WIDTH, least))
        else:
            assert order.BITS == 32 or order == own, "keys and values per channel share their groups"
            order = own
        sides.append(own._replace(D=dim, BLOCK_D=max(16, next_power_of_two(dim))))
    return *sides, order._replace(WORDS=tokens * order.BITS // 32, REST=rest * order.BITS // 32)  # type: ignore[return-value]


def _stored(side: Side, outliers: Tensor | None) -> Stored:
    """The numbers of a token, and the words of an entry, side by side."""
    packed, tail = side.packed, side.tail
    words, scale, minimum = packed.words, packed.scale, packed.minimum
    if words.stride()[3:] != (words.shape[4], 1):
        words = words.contiguous()
    if scale.stride() != minimum.stride() or scale.stride(-1) != 1:
        scale, minimum = scale.contiguous(), minimum.contiguous()
    if not tail.is_cuda and tail.dtype == torch.bfloat16:
        tail = tail.float()
    exact = rows(tail if outliers is None else outliers)
    return Stored(View(words, *words.stride()[:3]), view(scale), view(minimum), rows(tail), exact)

# ruff: noqa: N803, N806 - in kernels, sizes have the names they have in shapes
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
from kvbench.kernels.jit import at_head, fit_heads, jit, next_power_of_two, require_triton, tl, view
from kvbench.kernels.join_splits import Parts, finish
from kvbench.kernels.packed import Packed, Side
from kvbench.kernels.prompt_tiles import scale_and_cap
from kvbench.kernels.quantised_tiles import Groups, Stored, attended, channels, coded, held, places

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
def _among(tokens: tl.tensor, slots_ptr: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Which of the tokens are outliers: one of the E at slots_ptr after the other, which takes few registers."""
    found = tokens < 0
    for entry in range(E):
        found = found | (tokens == tl.load(slots_ptr + entry))
    return found


@partial(jit, varying=("key_coded", "value_coded", "length"))
def _attend_codes(
    q: tl.tensor,
    q_pos_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    H: tl.tensor,
    key_coded: tl.tensor,
    value_coded: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HALF: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: every num_programs(1)-th tile of one KV head's tokens, then of those not in codes and outliers.

    Tokens are in the order of TOKENS, the groups of a side per channel: WORDS, then REST, of its words are a tile.
    """
    PRODUCTS: tl.constexpr = tl.float16 if HALF else tl.float32
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part, parts = tl.program_id(1), tl.num_programs(1)
    if lengths_ptr is not None:  # [3,B*H]: keys in codes, values in codes, all
        key_coded = tl.load(lengths_ptr + row)
        value_coded = tl.load(lengths_ptr + tl.num_programs(0) + row)
        length = tl.load(lengths_ptr + 2 * tl.num_programs(0) + row)
    asked = tl.load(q_pos_ptr + row // H) >= 0  # a padded sequence asks nothing
    k_dims, k_there = channels(KEY, D, BLOCK_D)
    v_dims, v_there = channels(VALUE, D_V, BLOCK_V)
    heads = tl.arange(0, ROWS)
    q_rows = at_head(q, row * G, H * G) + heads[:, None] * q.head + k_dims[None, :]
    numbers = tl.load(q_rows, mask=(heads < G)[:, None] & k_there[None, :], other=0.0)
    numbers = (numbers.to(tl.float32) * scale).to(PRODUCTS)
    if E > 0:
        slots_ptr += row * E
        entries = tl.arange(0, BLOCK_E)
        outliers = tl.load(slots_ptr + entries, mask=entries < E, other=-1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, v_dims.shape[0]], tl.float32)
    whole = tl.minimum(key_coded, value_coded) // TOKENS.U * TOKENS.WIDTH // TOKENS.WORDS  # tiles of nothing but codes
    for tile in tl.range(part, tl.where(asked, whole, 0), parts, num_stages=STAGES):
        first = tile * TOKENS.WORDS
        tokens, seen = places(first, TOKENS.WORDS, TOKENS)
        k = coded(keys, row, H, first, tokens, key_coded, KEY, TOKENS.WORDS, D, BLOCK_D, PRODUCTS)
        v = coded(values, row, H, first, tokens, value_coded, VALUE, TOKENS.WORDS, D_V, BLOCK_V, PRODUCTS)
        if E > 0:  # few tiles have outliers
            past = (first + TOKENS.WORDS + TOKENS.WIDTH - 1) // TOKENS.WIDTH * TOKENS.U
            near = (outliers >= first // TOKENS.WIDTH * TOKENS.U) & (outliers < past)
            if tl.max(near.to(tl.int32), 0) > 0:
                seen = seen & ~_among(tokens, slots_ptr, E)
        top, total, out = attended(numbers, k, v, seen, top, total, out, cap, KEY, VALUE)
    first = whole * TOKENS.WORDS
    tiles = tl.cdiv(tl.cdiv(length + E, TOKENS.U) * TOKENS.WIDTH - first, TOKENS.REST)
    for tile in range(part, tl.where(asked, tiles, 0), parts):
        here = first + tile * TOKENS.REST
        tokens, placed = places(here, TOKENS.REST, TOKENS)
        seen, entry, inside = placed & (tokens < length), tokens, placed
        if E > 0:  # they stand behind the last token
            entry = tokens - length
            inside = placed & (entry >= 0) & (entry < E)
            inside = inside & (tl.load(slots_ptr + entry, mask=inside, other=-1) >= 0)
        k = held(
            keys, row, H, here, tokens, seen, key_coded, entry, inside, KEY, TOKENS.REST, E, D, BLOCK_D, PRODUCTS
        )  # fmt: skip
        v = held(
            values, row, H, here, tokens, seen, value_coded, entry, inside, VALUE, TOKENS.REST, E, D_V, BLOCK_V,
            PRODUCTS,
        )  # fmt: skip
        if E > 0:
            seen = (seen & ~_among(tokens, slots_ptr, E)) | inside
        top, total, out = attended(numbers, k, v, seen, top, total, out, cap, KEY, VALUE)
    v_dims = tl.where(v_there, v_dims, D_V)  # what fills a group up is stored nowhere
    store_part(out_ptr, lse_ptr, (row * parts + part) * G + heads, heads < G, top, total, out, v_dims, D_V)


def tiles(dim: int, value_dim: int, dtype: torch.dtype, outliers: bool) -> dict[str, Any]:
    """Tokens of a tile, and of one whose tokens are not all codes; launch options: see the table in docs/kernels.md."""
    wide = max(dim, value_dim) > 128
    if dtype == torch.float32:
        return {"tokens": 16 if wide else 32, "rest": 16, "HALF": False, "STAGES": 1, "num_warps": 8}
    sizes = {"tokens": 64, "rest": 16} if outliers else {"tokens": 64 if wide else 128, "rest": 32}
    registers = 128 if max(dim, value_dim) <= 64 and not outliers else 255  # left alone, ptxas spills a few
    return {**sizes, "HALF": True, "STAGES": 2, "num_warps": 8 if wide else 4, "maxnreg": registers}


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
    key, value, tokens = _layout(keys.packed, values.packed, how.pop("tokens"), how.pop("rest"))
    pool = None if outliers is None else Outliers(*(x.contiguous() for x in outliers))
    stored = _stored(keys, pool and pool.keys), _stored(values, pool and pool.values)
    even, entries = keys.even and values.even, 0 if pool is None else pool.slots.shape[2]
    lengths = None
    if not even:
        lengths = torch.stack([keys.coded(), values.coded(), keys.lengths()]).to(torch.int32).contiguous()
    longest, group = keys.packed.tokens + keys.tail.shape[2], query_heads // heads
    blocks = -(-(-(-(longest + entries) // tokens.U) * tokens.WIDTH) // tokens.WORDS)
    parts = splits_for(batch * heads, blocks, programs_at_once(queries.device))
    part_out = queries.new_empty(batch * heads * parts, group, value_dim, dtype=torch.float32)
    part_lse = part_out.new_empty(part_out.shape[:2])
    with torch.cuda.device_of(queries):
        _attend_codes[batch * heads, parts](
            view(queries), query_positions.contiguous(), pool and pool.slots, lengths, part_out, part_lse, *stored,
            heads, keys.packed.tokens, values.packed.tokens, longest, *scale_and_cap(scaling, softcap),
            KEY=key, VALUE=value, TOKENS=tokens, G=group, D=dim, D_V=value_dim, E=entries,
            ROWS=max(ROWS, next_power_of_two(group)), BLOCK_D=max(16, next_power_of_two(dim)),
            BLOCK_V=max(16, next_power_of_two(value_dim)), BLOCK_E=next_power_of_two(max(entries, 1)), **how,
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


def _layout(keys: Packed, values: Packed, tokens: int, rest: int) -> tuple[Groups, Groups, Groups]:
    """How keys, values and tokens lie in words; a tile has `tokens` of these, or `rest` where not all are codes."""
    sides = []
    order = Groups(False, 32, tokens, tokens, tokens, 0)  # in order will do
    for packed in (keys, values):
        words = packed.words.shape[-1]
        own = Groups(packed.per_token, packed.bits, packed.unit, words, next_power_of_two(words), 0)
        if packed.per_token:
            least = 16 * packed.bits // 32  # a product takes 16 channels
            own = own._replace(WORDS=max(next_power_of_two(packed.words.shape[3]) * own.WIDTH, least))
        else:
            assert order.BITS == 32 or order == own, "keys and values per channel share their groups"
            order = own
        sides.append(own)
    return *sides, order._replace(WORDS=tokens * order.BITS // 32, REST=rest * order.BITS // 32)  # type: ignore[return-value]


def _stored(side: Side, outliers: Tensor | None) -> Stored:
    """The numbers of a token, and the words of an entry, side by side."""
    packed, tail = side.packed, side.tail
    words, scale, minimum = packed.words, packed.scale, packed.minimum
    if words.stride()[3:] != (words.shape[4], 1):
        words = words.contiguous()
    if scale.stride() != minimum.stride() or scale.stride(-1) != 1:
        scale, minimum = scale.contiguous(), minimum.contiguous()
    tail = tail if tail.stride(-1) == 1 else tail.contiguous()
    if not tail.is_cuda and tail.dtype == torch.bfloat16:
        tail = tail.float()
    strides = *words.stride()[:3], *scale.stride()[:3], *tail.stride()[:3]
    return Stored(words, scale, minimum, tail, outliers, *strides)

# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""Attention of one new query per sequence on packed codes of 2, 4 or 8 bits, a tail in full precision and outliers.

The kernel reads the tokens with quantized key and value: it unpacks a tile of them in registers and computes
attention, so that no dequantized tensor is written. `decode_attention` reads all other tokens, a few hundred at most;
the two outputs are joined by their log-sum-exp. Codes are unpacked two at a time, one of each 16-bit half of a word:
0, 8, 1, 9, ... at 2 bits; `places` has the order. A code's bits below the bits of 1024 are the float16 number 1024 +
code, so that no integer is converted.

Shapes: B batch, H KV heads, G query heads per KV head, N quantized tokens, R tokens of a tail, E outlier entries, n
tokens of a part, U numbers of a group, W int32 words of a group, D head dim of keys, D_v of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention
from kvbench.kernels.join import join
from kvbench.kernels.references import Attention
from kvbench.kernels.tiles import (
    Rule,
    View,
    at_head,
    attend,
    capped,
    empty_part,
    fit_heads,
    jit,
    next_power_of_two,
    of_head,
    parts_of,
    programs_at_once,
    require_triton,
    rule_of,
    slots_of_a_part,
    store_part,
    tl,
    view,
)

ROWS = 16  # query heads of a KV head, padded: the minimum of tensor cores
PARTS = 128  # maximum per KV head


@dataclass(frozen=True)
class Packed:
    """Quantised tokens: x = code * scale + minimum; code j of an int32 word is at bits [b*j, b*j + b - 1].

    Per channel: groups of `unit` tokens, words [B,H,N/U,D,W], scale and minimum [B,H,N/U,D]. Per token (`per_token`):
    groups of `unit` channels, words [B,H,N,D/U,W], scale and minimum [B,H,N,D/U].
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    unit: int
    per_token: bool

    @property
    def tokens(self) -> int:
        """The number of tokens of a KV head."""
        return self.words.shape[2] * (1 if self.per_token else self.unit)

    def after(self, first: int) -> Tensor:
        """The tokens from number `first` on, [B,H,n,D] float32."""
        entry = first if self.per_token else first // self.unit
        words, scale, minimum = (x[:, :, entry:] for x in (self.words, self.scale, self.minimum))
        shifts = torch.arange(0, 32, self.bits, device=words.device, dtype=torch.int32)
        codes = ((words[..., None] >> shifts) & (2**self.bits - 1)).flatten(4)[..., : self.unit]
        x: Tensor = codes * scale[..., None].float() + minimum[..., None].float()
        return x.flatten(3) if self.per_token else x.mT.flatten(2, 3)[:, :, first % self.unit :]


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer: codes, then a tail [B,H,R,D] in full precision."""

    packed: Packed
    tail: Tensor

    def after(self, first: int) -> Tensor:
        """The tokens from number `first` on, [B,H,n,D] float32."""
        coded = self.packed.tokens
        tail = self.tail[:, :, max(first - coded, 0) :].float()
        return torch.cat([self.packed.after(first), tail], dim=2) if first < coded else tail


class Outliers(NamedTuple):
    """Exact keys [B,H,E,D] and values [B,H,E,D_v] that replace the tokens at slots [B,H,E] int32; -1 = empty."""

    keys: Tensor
    values: Tensor
    slots: Tensor


class Codes(NamedTuple):
    """Codes as arguments of the kernel: words, scale and minimum [B,H,N',..], N' tokens or groups of tokens. Scale
    and minimum have the same strides."""

    words: View
    scale: View
    minimum: View


class Groups(NamedTuple):
    """Layout of codes in words: BITS each, groups of U numbers in W of WIDTH words of a token (PER_TOKEN) or a channel.

    WORDS: number of words of a token (PER_TOKEN) or a channel that are read at once. D channels, padded to BLOCK_D.
    """

    PER_TOKEN: bool
    BITS: int
    U: int
    W: int
    WIDTH: int
    WORDS: int = 0
    D: int = 0
    BLOCK_D: int = 0


@jit
def places(first: tl.tensor, WORDS: tl.constexpr, HOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Indices of the numbers in WORDS words from `first` on, and whether they exist: a group fills WIDTH words."""
    PER_WORD: tl.constexpr = 32 // HOW.BITS
    column = tl.arange(0, WORDS * PER_WORD)
    word, code = first + column // PER_WORD, column % PER_WORD
    if PER_WORD > 1:
        code = code // 2 + code % 2 * (PER_WORD // 2)
    place = word % HOW.WIDTH * PER_WORD + code
    return word // HOW.WIDTH * HOW.U + place, place < HOW.U


@jit
def channels(HOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The channels of a tile's numbers, and whether they exist."""
    if HOW.PER_TOKEN:
        dims, there = places(0, HOW.WORDS, HOW)
    else:
        dims, there = tl.arange(0, HOW.BLOCK_D), tl.arange(0, HOW.BLOCK_D) >= 0
    return dims, there & (dims < HOW.D)


@jit
def _half(
    words: tl.tensor, HALF: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr, APART: tl.constexpr
) -> tl.tensor:
    """Codes at bits SHIFT, SHIFT + APART, ... of half HALF of every word, as int16 bits of 1024 + code."""
    if APART < 16:
        codes = tl.interleave(
            _half(words, HALF, BITS, SHIFT, 2 * APART), _half(words, HALF, BITS, SHIFT + APART, 2 * APART)
        )
    else:
        both = ((words >> SHIFT) & (((1 << BITS) - 1) * 0x10001)) | 0x64006400
        codes = (both >> (16 * HALF)).to(tl.int16)
    return codes


@jit
def coded(
    side: Codes, first: tl.tensor, tokens: tl.tensor, coded: tl.tensor, HOW: tl.constexpr, TILE: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile of one KV head, 0 beyond the `coded` tokens: [tokens,channels] if PER_TOKEN, otherwise transposed.

    TILE: words of a channel.
    """
    WORDS: tl.constexpr = HOW.WORDS if HOW.PER_TOKEN else TILE
    if HOW.PER_TOKEN:
        rows, inside, groups, start = tokens.to(tl.int64), tokens < coded, HOW.D // HOW.U, 0
        row_words, row_scales, group_words, group_scales = side.words.row, side.scale.row, HOW.W, 1
    else:
        rows, inside = tl.arange(0, HOW.BLOCK_D), tl.arange(0, HOW.BLOCK_D) < HOW.D
        groups, start = tl.cdiv(coded, HOW.U), first
        row_words, row_scales, group_words, group_scales = HOW.W, 1, side.words.row, side.scale.row
    column = start + tl.arange(0, WORDS)
    group, word = column // HOW.WIDTH, column % HOW.WIDTH
    at = rows[:, None] * row_words + (group.to(tl.int64) * group_words + word)[None, :]
    there = inside[:, None] & ((group < groups) & (word < HOW.W))[None, :]
    words = tl.load(side.words.ptr + at, mask=there, other=0)
    codes = tl.interleave(_half(words, 0, HOW.BITS, 0, HOW.BITS), _half(words, 1, HOW.BITS, 0, HOW.BITS))
    codes = (codes.to(tl.float16, bitcast=True) - 1024.0).to(PRODUCTS)
    ROWS: tl.constexpr = codes.shape[0]
    NUMBERS: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = (WORDS + HOW.WIDTH - 1) // HOW.WIDTH
    group = start // HOW.WIDTH + tl.arange(0, GROUPS)
    at = rows[:, None] * row_scales + (group.to(tl.int64) * group_scales)[None, :]
    there = inside[:, None] & (group < groups)[None, :]
    scale = tl.load(side.scale.ptr + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    minimum = tl.load(side.minimum.ptr + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    numbers = tl.reshape(codes, (ROWS, GROUPS, NUMBERS // GROUPS)) * scale + minimum
    return tl.reshape(numbers, (ROWS, NUMBERS))


@jit
def scaled(
    q: View, row: tl.tensor, H: tl.tensor, heads: tl.tensor, scale: tl.tensor, KEY: tl.constexpr, G: tl.constexpr
) -> tl.tensor:
    """The queries of KV head `row`, [heads,channels of a tile of its keys], times `scale`."""
    dims, there = channels(KEY)
    at = at_head(q, row * G, H * G) + heads[:, None] * q.head + dims[None, :]
    return tl.load(at, mask=(heads < G)[:, None] & there[None, :], other=0.0).to(tl.float32) * scale


@partial(jit, varying=("coded_tokens", "words", "each"))
def _attend_codes(
    q: View, q_pos_ptr: tl.tensor, absent: View, out_ptr: tl.tensor, lse_ptr: tl.tensor, keys: Codes, values: Codes,
    H: tl.tensor, coded_tokens: tl.tensor, words: tl.tensor, each: tl.tensor, rule: Rule, KEY: tl.constexpr,
    VALUE: tl.constexpr, TOKENS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, PRODUCTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the quantized tokens of `each` words of one KV head, TOKENS.WORDS at a time, without absent ones.

    Tokens are in the order of TOKENS, the groups of a side per channel.
    """
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part, parts = tl.program_id(1), tl.num_programs(1)
    begin = part * each
    steps = tl.cdiv(tl.minimum(begin + each, words) - begin, TOKENS.WORDS)
    asked = tl.load(q_pos_ptr + row // H) >= 0  # the query of a padded sequence sees nothing
    heads = tl.arange(0, ROWS)
    numbers = scaled(q, row, H, heads, rule.scale, KEY, G).to(PRODUCTS)
    keys = Codes(of_head(keys.words, row, H, 0), of_head(keys.scale, row, H, 0), of_head(keys.minimum, row, H, 0))
    values = Codes(
        of_head(values.words, row, H, 0), of_head(values.scale, row, H, 0), of_head(values.minimum, row, H, 0)
    )
    dims, there = channels(VALUE)
    top, total, out = empty_part(ROWS, dims.shape[0])
    for step in range(tl.where(asked, steps, 0)):
        first = begin + step * TOKENS.WORDS
        tokens, placed = places(first, TOKENS.WORDS, TOKENS)
        k = coded(keys, first, tokens, coded_tokens, KEY, TOKENS.WORDS, PRODUCTS)
        v = coded(values, first, tokens, coded_tokens, VALUE, TOKENS.WORDS, PRODUCTS)
        seen = placed & (tokens < coded_tokens)
        if absent is not None:
            seen = seen & (tl.load(at_head(absent, row, H) + tokens, mask=seen, other=1) == 0)
        if KEY.PER_TOKEN:
            k = tl.trans(k)
        if not VALUE.PER_TOKEN:
            v = tl.trans(v)
        logits = capped(tl.dot(numbers, k, input_precision="ieee"), rule.cap)
        top, total, out = attend(tl.where(seen[None, :], logits, float("-inf")), v, top, total, out)
    dims = tl.where(there, dims, VALUE.D)  # the padding of a group is not stored
    store_part(out_ptr, lse_ptr, (row * parts + part) * G + heads, heads < G, top, total, out, dims, VALUE.D)


def tiles(dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tokens of a tile and launch options; 16-bit queries are multiplied as float16, float32 ones in float32."""
    wide = max(dim, value_dim) > 128
    if dtype == torch.float32:
        return {"tokens": 16 if wide else 32, "PRODUCTS": tl.float32, "num_warps": 8, "num_stages": 1}
    registers = 128 if max(dim, value_dim) <= 64 else 255  # without a bound ptxas spills a few
    sizes = {"tokens": 64, "num_warps": 8} if wide else {"tokens": 128, "num_warps": 4}
    return {**sizes, "PRODUCTS": tl.float16, "num_stages": 2, "maxnreg": registers}


def quantised_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Side,
    values: Side,
    scaling: float,
    softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:
    """Attention of one query per sequence over all tokens of codes, tail and outliers.

    queries [B,H_q,1,D], query_positions [B,1] (-1: padding). Every stored token is visible to the query, and each side
    has quantized tokens. Products are float32 for float32 queries, otherwise of float16 numbers, summed in float32. If
    both sides are per channel, their groups must have the same size. A query at -1 has output 0 and log-sum-exp -inf.
    Raises ValueError without Triton.
    """
    require_triton("quantised_attention", queries.device)
    fit_heads("quantised_attention", queries.shape[3], values.tail.shape[3])
    assert queries.shape[2] == 1, "one query per sequence"
    common = min(keys.packed.tokens, values.packed.tokens)  # tokens with quantized key and value
    rest = _attend_to_the_rest(queries, query_positions, keys, values, common, scaling, softcap, outliers)
    out, log_sum_exp = _attend_to_codes(queries, query_positions, keys, values, common, scaling, softcap, outliers)
    whole = torch.logaddexp(log_sum_exp, rest.log_sum_exp)
    shift = whole.masked_fill(whole == -torch.inf, 0.0)
    shares = ((x - shift).exp()[..., None] for x in (log_sum_exp, rest.log_sum_exp))
    joined = sum(x.float() * share for x, share in zip((out, rest.out), shares, strict=True))
    assert isinstance(joined, Tensor)
    return Attention(joined.to(queries.dtype), whole)


def _attend_to_the_rest(
    queries: Tensor, query_positions: Tensor, keys: Side, values: Side, common: int, scaling: float,
    softcap: float | None, outliers: Outliers | None,
) -> Attention:  # fmt: skip
    """Attention over the tokens with an exact key or value, and over the outliers."""
    k, v = (side.after(common).to(queries.dtype) for side in (keys, values))
    there = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
    if outliers is not None:
        k, v = torch.cat([k, outliers.keys.to(k.dtype)], 2), torch.cat([v, outliers.values.to(v.dtype)], 2)
        there = torch.cat([there, outliers.slots >= 0], -1)
    return decode_attention(queries, k, v, query_positions, there.int() - 1, scaling, softcap)


def _attend_to_codes(
    queries: Tensor, query_positions: Tensor, keys: Side, values: Side, common: int, scaling: float,
    softcap: float | None, outliers: Outliers | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the tokens with quantized key and value, without outliers: output float32, log-sum-exp."""
    (batch, query_heads, _, dim), heads, value_dim = queries.shape, keys.tail.shape[1], values.tail.shape[3]
    if not queries.is_cuda and queries.dtype == torch.bfloat16:
        queries = queries.float()  # Triton's interpreter multiplies the bit patterns of bfloat16
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    how = tiles(dim, value_dim, queries.dtype)
    form_k, form_v = ((x.packed.bits, x.packed.unit, x.packed.per_token) for x in (keys, values))
    key, value, order = layouts(form_k, form_v, (dim, value_dim), how.pop("tokens"))
    absent: View | None = None
    if outliers is not None:
        flags = torch.zeros(batch, heads, common + 1, dtype=torch.uint8, device=queries.device)
        absent = view(flags.scatter_(-1, outliers.slots.long().masked_fill(outliers.slots < 0, common), 1))
    words = -(-common // order.U) * order.WIDTH
    each = slots_of_a_part(batch * heads, words, order.WORDS, programs_at_once(queries.device))
    each = max(each, -(-words // (PARTS * order.WORDS)) * order.WORDS)
    parts, group = -(-words // each), query_heads // heads
    wide = queries.float()
    part_out, part_lse = parts_of(wide, parts, heads, value_dim)
    with torch.cuda.device_of(queries):
        _attend_codes[batch * heads, parts](
            view(queries), query_positions.contiguous(), absent, part_out, part_lse,
            _codes(keys.packed), _codes(values.packed), heads, common, words, each, rule_of(scaling, softcap),
            KEY=key, VALUE=value, TOKENS=order, G=group, ROWS=max(ROWS, next_power_of_two(group)), **how,
        )  # fmt: skip
        return join(part_out, part_lse, wide, heads, words, each)


def layouts(
    keys: tuple[int, int, bool], values: tuple[int, int, bool], dims: tuple[int, int], tokens: int
) -> tuple[Groups, Groups, Groups]:
    """Layouts of keys, values and tokens in words; a tile has `tokens` tokens.

    keys, values: bits, numbers of a group and whether it is of one token.
    """
    sides = []
    order = Groups(False, 32, tokens, tokens, tokens)  # if both sides are per token, they are read in order
    for (bits, unit, per_token), dim in zip((keys, values), dims, strict=True):
        words = -(-unit * bits // 32)
        own = Groups(per_token, bits, unit, words, next_power_of_two(words))
        if per_token:
            least = 16 * bits // 32  # a product takes 16 channels
            own = own._replace(WORDS=max(next_power_of_two(dim // unit) * own.WIDTH, least))
        else:
            assert order.BITS == 32 or order == own, "keys and values per channel share their groups"
            order = own
        sides.append(own._replace(D=dim, BLOCK_D=max(16, next_power_of_two(dim))))
    return sides[0], sides[1], order._replace(WORDS=tokens * order.BITS // 32)


def _codes(packed: Packed) -> Codes:
    """Codes with contiguous words per entry, and equal strides of scale and minimum."""
    words, scale, minimum = packed.words, packed.scale, packed.minimum
    if words.stride()[3:] != (words.shape[4], 1):
        words = words.contiguous()
    if scale.stride() != minimum.stride() or scale.stride(-1) != 1:
        scale, minimum = scale.contiguous(), minimum.contiguous()
    return Codes(View(words, *words.stride()[:3]), view(scale), view(minimum))

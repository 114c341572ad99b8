# ruff: noqa: N803, N806 - in kernels, sizes have the names they have in shapes
"""Tiles of packed codes as numbers in registers, for attention on them.

Codes are unpacked two at a time, one of each 16-bit half of a word: 0, 8, 1, 9, ... at 2 bits. Attention does not mind
the order of tokens, nor of channels, so nothing is sorted back: `places` says which is where. Below the bits of 1024,
a code's bits make the float16 1024 + code, so that no integer is converted.

Shapes: B batch, H KV heads, N tokens in codes, R tokens of a tail, E outlier entries, U numbers of a group, W int32
words of a group, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbench.kernels.jit import View, jit, of_head, tl
from kvbench.kernels.prompt_tiles import attend, capped


class Stored(NamedTuple):
    """Keys or values as the kernel takes them: codes, a tail in full precision, exact outliers.

    words [B,H,N',..], scale and minimum [B,H,N',..] of the same strides, N' of groups of tokens, or of tokens; tail
    [B,H,R,D]; exact [B,H,E,D], of no meaning where E is 0.
    """

    words: View
    scale: View
    minimum: View
    tail: View
    exact: View


class Groups(NamedTuple):
    """How codes lie in words: BITS each, groups of U numbers in W of WIDTH words, one token's (PER_TOKEN) or channel's.

    WORDS: of a token, PER_TOKEN, or of a channel that are read at once; REST: where not all tokens are in codes. D
    channels, BLOCK_D filled up.
    """

    PER_TOKEN: bool
    BITS: int
    U: int
    W: int
    WIDTH: int
    WORDS: int = 0
    REST: int = 0
    D: int = 0
    BLOCK_D: int = 0


@jit
def of_side(x: Stored, row: tl.tensor, H: tl.tensor) -> Stored:
    """What KV head `row` has of keys or values."""
    words, scale, minimum = of_head(x.words, row, H, 0), of_head(x.scale, row, H, 0), of_head(x.minimum, row, H, 0)
    return Stored(words, scale, minimum, of_head(x.tail, row, H, 0), of_head(x.exact, row, H, 0))


@jit
def places(first: tl.tensor, WORDS: tl.constexpr, HOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which numbers WORDS words from `first` on unpack to, and whether they are: a group fills WIDTH words."""
    PER_WORD: tl.constexpr = 32 // HOW.BITS
    column = tl.arange(0, WORDS * PER_WORD)
    word, code = first + column // PER_WORD, column % PER_WORD
    if PER_WORD > 1:
        code = code // 2 + code % 2 * (PER_WORD // 2)
    place = word % HOW.WIDTH * PER_WORD + code
    return word // HOW.WIDTH * HOW.U + place, place < HOW.U


@jit
def channels(HOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which channels a tile's numbers are, and whether they are."""
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
    side: Stored,
    first: tl.tensor,
    tokens: tl.tensor,
    coded: tl.tensor,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """A tile of one KV head, 0 beyond the `coded` tokens: [tokens,channels] PER_TOKEN, else [channels,tokens].

    TILE: words of a channel.
    """
    WORDS: tl.constexpr = HOW.WORDS if HOW.PER_TOKEN else TILE
    if HOW.PER_TOKEN:
        rows, inside, groups, start = tokens.to(tl.int64), tokens < coded, HOW.D // HOW.U, 0
        row_words, row_scales, group_words, group_scales = side.words.row, side.scale.row, HOW.W, 1
    else:
        rows, inside, groups, start = (
            tl.arange(0, HOW.BLOCK_D),
            tl.arange(0, HOW.BLOCK_D) < HOW.D,
            coded // HOW.U,
            first,
        )
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
def _exact(x: View, tokens: tl.tensor, inside: tl.tensor, HOW: tl.constexpr, PRODUCTS: tl.constexpr) -> tl.tensor:
    """Tokens of one KV head in full precision where `inside`, laid out as `coded` lays them out; 0 elsewhere."""
    dims, there = channels(HOW)
    tokens = tokens.to(tl.int64) * x.row
    if HOW.PER_TOKEN:
        at, mask = tokens[:, None] + dims[None, :], inside[:, None] & there[None, :]
    else:
        at, mask = tokens[None, :] + dims[:, None], inside[None, :] & there[:, None]
    return tl.load(x.ptr + at, mask=mask, other=0.0).to(PRODUCTS)


@jit
def held(
    side: Stored,
    first: tl.tensor,
    tokens: tl.tensor,
    seen: tl.tensor,
    coded_tokens: tl.tensor,
    entry: tl.tensor,
    inside: tl.tensor,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    E: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """As `coded`, of a tile whose tokens are codes, the tail's where `seen`, or of E outliers those `inside`."""
    x = coded(side, first, tokens, coded_tokens, HOW, TILE, PRODUCTS)
    x += _exact(side.tail, tokens - coded_tokens, seen & (tokens >= coded_tokens), HOW, PRODUCTS)
    if E > 0:
        x += _exact(side.exact, entry, inside, HOW, PRODUCTS)
    return x


@jit
def attended(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    cap: tl.tensor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output after one more tile; logits are in base 2."""
    if KEY.PER_TOKEN:
        k = tl.trans(k)
    if not VALUE.PER_TOKEN:
        v = tl.trans(v)
    logits = capped(tl.dot(q, k, input_precision="ieee"), cap)
    top, total, out = attend(tl.where(seen[None, :], logits, float("-inf")), v, top, total, out)
    return top, total, out

# ruff: noqa: N803, N806 - in kernels, sizes have the names they have in shapes
"""Tiles of packed codes as numbers in registers, for attention on them.

Codes are unpacked two at a time, one of each 16-bit half of a word: 0, 8, 1, 9, ... at 2 bits. Attention does not mind
the order of tokens, nor of channels, so nothing is sorted back: `_places` says which is where. Below the bits of 1024,
a code's bits make the float16 1024 + code, so that no integer is converted.

Shapes: B batch, H KV heads, N tokens in codes, R tokens of a tail, E outlier entries, U numbers of a group, W int32
words of a group, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvbench.kernels.jit import jit, tl
from kvbench.kernels.prompt_tiles import capped, weighed


class Stored(NamedTuple):
    """Keys or values as the kernel takes them, and strides; an entry of words or scales is a group of tokens, or one.

    tail [B,H,R,D] in full precision; exact [B,H,E,D] contiguous, of the outliers.
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor
    tail: Tensor
    exact: Tensor | None
    word_batch: int
    word_head: int
    word_entry: int
    scale_batch: int
    scale_head: int
    scale_entry: int
    tail_batch: int
    tail_head: int
    tail_token: int


class Groups(NamedTuple):
    """How codes lie in words: BITS each, groups of U numbers in W of WIDTH words, one token's (PER_TOKEN) or channel's.

    WORDS: of a token, PER_TOKEN, or of a channel that are read at once; REST: where not all tokens are in codes.
    """

    PER_TOKEN: bool
    BITS: int
    U: int
    W: int
    WIDTH: int
    WORDS: int
    REST: int = 0


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
def channels(HOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which channels a tile's numbers are, and whether they are."""
    if HOW.PER_TOKEN:
        dims, there = places(0, HOW.WORDS, HOW)
    else:
        dims, there = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D) >= 0
    return dims, there & (dims < D)


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
    side: tl.tensor,
    row: tl.tensor,
    H: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    coded: tl.tensor,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """A tile of numbers, 0 beyond the `coded` tokens: [tokens,channels] PER_TOKEN, else [channels,tokens].

    TILE: words of a channel.
    """
    WORDS: tl.constexpr = HOW.WORDS if HOW.PER_TOKEN else TILE
    if HOW.PER_TOKEN:
        rows, inside, groups, start = tokens.to(tl.int64), tokens < coded, D // HOW.U, 0
        row_words, row_scales, group_words, group_scales = side.word_entry, side.scale_entry, HOW.W, 1
    else:
        rows, inside, groups, start = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D) < D, coded // HOW.U, first
        row_words, row_scales, group_words, group_scales = HOW.W, 1, side.word_entry, side.scale_entry
    column = start + tl.arange(0, WORDS)
    group, word = column // HOW.WIDTH, column % HOW.WIDTH
    at = rows[:, None] * row_words + (group.to(tl.int64) * group_words + word)[None, :]
    there = inside[:, None] & ((group < groups) & (word < HOW.W))[None, :]
    at += row // H * side.word_batch + row % H * side.word_head
    words = tl.load(side.words + at, mask=there, other=0)
    codes = tl.interleave(_half(words, 0, HOW.BITS, 0, HOW.BITS), _half(words, 1, HOW.BITS, 0, HOW.BITS))
    codes = (codes.to(tl.float16, bitcast=True) - 1024.0).to(PRODUCTS)
    ROWS: tl.constexpr = codes.shape[0]
    NUMBERS: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = (WORDS + HOW.WIDTH - 1) // HOW.WIDTH
    group = start // HOW.WIDTH + tl.arange(0, GROUPS)
    at = rows[:, None] * row_scales + (group.to(tl.int64) * group_scales)[None, :]
    at += row // H * side.scale_batch + row % H * side.scale_head
    there = inside[:, None] & (group < groups)[None, :]
    scale = tl.load(side.scale + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    minimum = tl.load(side.minimum + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    numbers = tl.reshape(codes, (ROWS, GROUPS, NUMBERS // GROUPS)) * scale + minimum
    return tl.reshape(numbers, (ROWS, NUMBERS))


@jit
def _exact(
    ptr: tl.tensor,
    stride: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    HOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """Tokens of one KV head in full precision where `inside`, laid out as `coded` lays them out; 0 elsewhere."""
    dims, there = channels(HOW, D, BLOCK_D)
    tokens = tokens.to(tl.int64) * stride
    if HOW.PER_TOKEN:
        at, mask = tokens[:, None] + dims[None, :], inside[:, None] & there[None, :]
    else:
        at, mask = tokens[None, :] + dims[:, None], inside[None, :] & there[:, None]
    return tl.load(ptr + at, mask=mask, other=0.0).to(PRODUCTS)


@jit
def held(
    side: tl.tensor,
    row: tl.tensor,
    H: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    seen: tl.tensor,
    coded_tokens: tl.tensor,
    entry: tl.tensor,
    inside: tl.tensor,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """As `coded`, of a tile whose tokens are codes, the tail's where `seen`, or of E outliers those `inside`."""
    x = coded(side, row, H, first, tokens, coded_tokens, HOW, TILE, D, BLOCK_D, PRODUCTS)
    in_tail = seen & (tokens >= coded_tokens)
    tail = side.tail + row // H * side.tail_batch + row % H * side.tail_head
    x += _exact(tail, side.tail_token, tokens - coded_tokens, in_tail, HOW, D, BLOCK_D, PRODUCTS)
    if E > 0:
        x += _exact(side.exact + row * E * D, D, entry, inside, HOW, D, BLOCK_D, PRODUCTS)
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
    weights, top, total, fading = weighed(tl.where(seen[None, :], logits, float("-inf")), top, total)
    return top, total, tl.dot(weights.to(v.dtype), v, out * fading[:, None], input_precision="ieee")

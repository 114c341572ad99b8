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
from kvbench.kernels.prompt_tiles import capped


class Stored(NamedTuple):
    """Keys or values as the kernel takes them, and strides; an entry of words or scales is a group of tokens, or one.

    tail [B,H,R,D] in full precision; exact [B,H,E,D] contiguous, of the outliers.
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor
    tail: Tensor
    exact: Tensor
    word_batch: int
    word_head: int
    word_entry: int
    scale_batch: int
    scale_head: int
    scale_entry: int
    tail_batch: int
    tail_head: int
    tail_token: int


@jit
def places(
    first: tl.tensor, COUNT: tl.constexpr, BITS: tl.constexpr, U: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which numbers the words from `first` on unpack to, [COUNT], and whether they are: a group fills WIDTH words."""
    PER_WORD: tl.constexpr = 32 // BITS
    column = tl.arange(0, COUNT)
    word, code = first + column // PER_WORD, column % PER_WORD
    if PER_WORD > 1:
        code = code // 2 + code % 2 * (PER_WORD // 2)
    place = word % WIDTH * PER_WORD + code
    return word // WIDTH * U + place, place < U


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
    batch: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    coded: tl.tensor,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """A tile of numbers, 0 beyond the `coded` tokens: [tokens,channels] PER_TOKEN, else [channels,tokens]."""
    if PER_TOKEN:
        rows, inside, groups, start = tokens.to(tl.int64), tokens < coded, D // U, 0
        row_words, row_scales, group_words, group_scales = side.word_entry, side.scale_entry, W, 1
    else:
        rows, inside, groups, start = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D) < D, coded // U, first
        row_words, row_scales, group_words, group_scales = W, 1, side.word_entry, side.scale_entry
    column = start + tl.arange(0, WORDS)
    group, word = column // WIDTH, column % WIDTH
    at = rows[:, None] * row_words + (group.to(tl.int64) * group_words + word)[None, :]
    there = inside[:, None] & ((group < groups) & (word < W))[None, :]
    words = tl.load(side.words + batch * side.word_batch + head * side.word_head + at, mask=there, other=0)
    codes = tl.interleave(_half(words, 0, BITS, 0, BITS), _half(words, 1, BITS, 0, BITS))
    codes = (codes.to(tl.float16, bitcast=True) - 1024.0).to(PRODUCTS)
    ROWS: tl.constexpr = codes.shape[0]
    NUMBERS: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = (WORDS + WIDTH - 1) // WIDTH
    group = start // WIDTH + tl.arange(0, GROUPS)
    at = rows[:, None] * row_scales + (group.to(tl.int64) * group_scales)[None, :]
    at += batch * side.scale_batch + head * side.scale_head
    there = inside[:, None] & (group < groups)[None, :]
    scale = tl.load(side.scale + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    minimum = tl.load(side.minimum + at, mask=there, other=0.0).to(PRODUCTS)[:, :, None]
    numbers = tl.reshape(codes, (ROWS, GROUPS, NUMBERS // GROUPS)) * scale + minimum
    return tl.reshape(numbers, (ROWS, NUMBERS))


@jit
def exact(
    ptr: tl.tensor,
    stride: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    channels: tl.tensor,
    there: tl.tensor,
    PER_TOKEN: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """Tokens of one KV head in full precision where `inside`, laid out as `coded` lays them out; 0 elsewhere."""
    tokens = tokens.to(tl.int64) * stride
    if PER_TOKEN:
        at, mask = tokens[:, None] + channels[None, :], inside[:, None] & there[None, :]
    else:
        at, mask = tokens[None, :] + channels[:, None], inside[None, :] & there[:, None]
    return tl.load(ptr + at, mask=mask, other=0.0).to(PRODUCTS)


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
    CAPPED: tl.constexpr,
    KEY_PER_TOKEN: tl.constexpr,
    VALUE_PER_TOKEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output after one more tile; logits are in base 2."""
    if KEY_PER_TOKEN:
        k = tl.trans(k)
    if not VALUE_PER_TOKEN:
        v = tl.trans(v)
    logits = capped(tl.dot(q, k, input_precision="ieee"), 1.0, cap, CAPPED)
    logits = tl.where(seen[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - shift[:, None])
    faded = tl.exp2(top - shift)
    out = tl.dot(weights.to(v.dtype), v, out * faded[:, None], input_precision="ieee")
    return new_top, total * faded + tl.sum(weights, 1), out

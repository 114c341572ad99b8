# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""The formats of groups of numbers in codes of 2, 4 or 8 bits, and the conversion of tiles in registers.

Codes are unpacked two at a time, one of each 16-bit half of a word: 0, 8, 1, 9, ... at 2 bits; `places` has the order.
A code's bits below the bits of 1024 are the float16 number 1024 + code, so that no integer is converted.

Shapes: B batch, H KV heads, G query heads per KV head, U numbers of a group, W int32 words of a group, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvbench.kernels.tiles import View, jit, next_power_of_two, tl


class Form(NamedTuple):
    """How keys or values of `dim` numbers are held in groups of one scale and minimum, with `bits` of a number.

    Per channel: groups of `unit` tokens. Per token (`per_token`): groups of `unit` channels.
    """

    bits: int
    unit: int
    per_token: bool
    dim: int

    @property
    def tokens(self) -> int:
        """Tokens of an entry: of a group, or one."""
        return 1 if self.per_token else self.unit

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of an entry by name: words [D,W], scale [D] and minimum [D], or [D/U,W] and [D/U] per token."""
        groups = self.dim // self.unit if self.per_token else self.dim
        return {"words": (groups, -(-self.unit * self.bits // 32)), "scale": (groups,), "minimum": (groups,)}


class Codes(NamedTuple):
    """Codes as arguments of a kernel: words, scale and minimum, whose strides are equal."""

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
    WORDS: int
    D: int
    BLOCK_D: int


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
    side: Codes, first: tl.tensor, tokens: tl.tensor, coded: tl.tensor, HOW: tl.constexpr, PRODUCTS: tl.constexpr
) -> tl.tensor:
    """A tile of one KV head, 0 beyond the `coded` tokens: [tokens,channels] if PER_TOKEN, otherwise transposed."""
    WORDS: tl.constexpr = HOW.WORDS
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


def tiles(dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tokens of a tile and launch options; 16-bit queries are multiplied as float16, float32 ones in float32."""
    wide = max(dim, value_dim) > 128
    if dtype == torch.float32:
        return {"tokens": 16 if wide else 32, "PRODUCTS": tl.float32, "num_warps": 8, "num_stages": 1}
    registers = 128 if max(dim, value_dim) <= 64 else 255  # without a bound ptxas spills a few
    sizes = {"tokens": 64, "num_warps": 8} if wide else {"tokens": 128, "num_warps": 4}
    return {**sizes, "PRODUCTS": tl.float16, "num_stages": 2, "maxnreg": registers}


def layout(form: Form, tokens: int) -> Groups:
    """Codes as constants of a kernel, whose tiles have `tokens` tokens."""
    words = -(-form.unit * form.bits // 32)
    width, at_once = next_power_of_two(words), tokens * form.bits // 32
    if form.per_token:
        least = 16 * form.bits // 32  # a product takes 16 channels
        at_once = max(next_power_of_two(form.dim // form.unit) * width, least)
    wide = max(16, next_power_of_two(form.dim))
    return Groups(form.per_token, form.bits, form.unit, words, width, at_once, form.dim, wide)

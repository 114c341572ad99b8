# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""The formats in which tokens are stored as codes, and the conversion of tiles from codes and to codes.

Shapes: N flat slots, T slots of a tile, D head dim, W bytes of a token's codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.devices import converts_float8, runs_assembly
from kvbench.kernels.tiles import View, jit, next_power_of_two, tl


class Format(NamedTuple):
    """How a vector of D numbers is stored: x = code * scale * factor.

    kind: what a code stands for: `e4m3`, `e2m1`, `integer` (signed, 8 bits), `zero point` (of 4 bits; the zero is in
    the four lowest bits of the scale), or `table` (an entry of a table). bits: of a code; codes of 3, 5, 6 or 7 bits
    are stored in planes of powers of two. group: numbers that share a scale, 0: there is none. least: of a scale.
    levels: of a group's largest number, or of its range. truncated: integers are rounded towards zero.
    encodes: kernels encode new tokens.
    """

    kind: str
    bits: int
    group: int = 0
    least: float = 0.0
    levels: float = 1.0
    truncated: bool = False
    encodes: bool = True


class Coded(NamedTuple):
    """Keys or values of D numbers in flat storage: codes [N,W] uint8, scale [N,D/group] (uint8: e4m3).

    table: the numbers of codes, rising, [2^bits]. factor: of all numbers.
    """

    codes: Tensor
    scale: Tensor | None
    table: Tensor | None
    factor: float
    dim: int
    format: Format

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and table as arguments of a kernel, which does not read a missing one."""
        scale, table = (self.codes if x is None else x for x in (self.scale, self.table))
        return self.codes, scale, table

    @property
    def layout(self) -> CodeLayout:
        """The constants of a kernel."""
        group = 0 if self.scale is None else min(self.format.group, self.dim)
        whole = max(16, next_power_of_two(self.dim))
        return CodeLayout(
            KIND=self.format.kind,
            BITS=self.format.bits,
            D=self.dim,
            BLOCK_D=whole,
            GROUP=whole if group == self.dim else group,
            BYTES=self.codes.shape[-1],
            SCALES=0 if self.scale is None else self.scale.shape[-1],
            E4M3_SCALES=self.scale is not None and self.scale.dtype == torch.uint8,
            NATIVE=converts_float8(self.codes),
            PERMUTE=PERMUTE if self.format.kind == "table" and self.format.bits <= 4 and runs_assembly() else None,
        )


class CodeLayout(NamedTuple):
    """A `Format` as constants of a kernel, for D numbers padded to BLOCK_D, in BYTES of codes and SCALES.

    PERMUTE: assembly that reads a table of up to 16 float16 numbers from registers; None: it is read from memory.
    """

    KIND: str
    BITS: int
    D: int
    BLOCK_D: int
    GROUP: int
    BYTES: int
    SCALES: int
    E4M3_SCALES: bool
    NATIVE: bool
    PERMUTE: str | None


def fits(form: Format, dim: int) -> bool:
    """Whether the kernels read this format: groups of a power of two, or one group."""
    return form.group in (0, dim) or form.group > dim or form.group & (form.group - 1) == 0


# --- numbers ---------------------------------------------------------------------------------------------------------
@jit
def from_e4m3(codes: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Bytes of e4m3 as float16."""
    if NATIVE:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # the bits of a float16 that is 256 times as small
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
        numbers = bits.to(tl.float16, bitcast=True) * 256.0
    return numbers


@jit
def _unpacked(bytes: tl.tensor, BITS: tl.constexpr, SHIFT: tl.constexpr, APART: tl.constexpr) -> tl.tensor:
    """Codes at bits SHIFT, SHIFT + APART, ... of every byte, in order."""
    if APART < 8:
        codes = tl.interleave(
            _unpacked(bytes, BITS, SHIFT, 2 * APART), _unpacked(bytes, BITS, SHIFT + APART, 2 * APART)
        )
    else:
        codes = (bytes >> SHIFT) & ((1 << BITS) - 1)
    return codes


@jit
def _codes(rows: tl.tensor, there: tl.tensor, BITS: tl.constexpr, HOW: tl.constexpr) -> tl.tensor:
    """Codes [T,BLOCK_D] of BITS bits at `rows` [T], uint8: planes of powers of two, the lowest bits first."""
    WIDTH: tl.constexpr = 8 if BITS >= 8 else (4 if BITS >= 4 else (2 if BITS >= 2 else 1))
    BYTES: tl.constexpr = (HOW.D * WIDTH + 7) // 8
    column = tl.arange(0, HOW.BLOCK_D * WIDTH // 8)
    bytes = tl.load(rows[:, None] + column[None, :], mask=there[:, None] & (column < BYTES)[None, :], other=0)
    codes = _unpacked(bytes, WIDTH, 0, WIDTH)
    if BITS > WIDTH:
        codes = codes | (_codes(rows + BYTES, there, BITS - WIDTH, HOW) << WIDTH)
    return codes


# PERMUTE converts eight codes of four bits, in the four bytes of $4, to float16: those in low halves of bytes to $0 and
# $1, in high halves to $2 and $3. $5, $9: the low bytes of the numbers 0 to 7 of the table; $13, $17: their high bytes;
# $21 to $33: the same of 8 to 15. Every word of the table comes four times, once for each byte of $4.
_HALF = """shr.u32 at, $4, {shift};
and.b32 first, at, 0x8888;
prmt.b32 mask, 0x80, 0, first;
shl.b32 mask, mask, 1;
prmt.b32 mask, mask, 0, 0xba98;
and.b32 at, at, 0x7777;
prmt.b32 first, $5, $9, at;
prmt.b32 second, $21, $25, at;
lop3.b32 low, mask, second, first, 0xca;
prmt.b32 first, $13, $17, at;
prmt.b32 second, $29, $33, at;
lop3.b32 high, mask, second, first, 0xca;
prmt.b32 ${low}, low, high, 0x6240;
prmt.b32 ${high}, low, high, 0x7351;
"""
PERMUTE = (
    "{.reg .b32 at, first, second, mask, low, high;\n"
    + _HALF.format(shift=0, low=0, high=2)
    + _HALF.format(shift=16, low=1, high=3)
    + "}"
)


@jit
def _four(table_ptr: tl.tensor, FIRST: tl.constexpr, LAST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The low and the high bytes of float16 numbers FIRST to FIRST + 3 of a table that ends with LAST, as words."""
    low, high = 0, 0
    for i in tl.static_range(4):
        number = tl.load(table_ptr + min(FIRST + i, LAST)).to(tl.float16)
        bits = number.to(tl.uint16, bitcast=True).to(tl.int32)
        low |= (bits & 255) << 8 * i
        high |= (bits >> 8) << 8 * i
    return low, high


@jit
def table_words(table_ptr: tl.tensor, HOW: tl.constexpr, PRODUCTS: tl.constexpr) -> tl.tensor:
    """A table as `numbers_of` reads it: the words of PERMUTE, or its address."""
    words = table_ptr
    if HOW.PERMUTE is not None and tl.float16 == PRODUCTS:
        LAST: tl.constexpr = (1 << HOW.BITS) - 1
        a, b = _four(table_ptr, 0, LAST), _four(table_ptr, 4, LAST)
        c, d = _four(table_ptr, 8, LAST), _four(table_ptr, 12, LAST)
        words = (a[0], b[0], a[1], b[1], c[0], d[0], c[1], d[1])
    return words


@jit
def _looked_up(codes: tl.tensor, words: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """The float16 numbers of codes uint8 [T,D] of at most four bits."""
    T: tl.constexpr = codes.shape[0]
    PAIRS: tl.constexpr = codes.shape[1] // 2
    first, second = tl.split(tl.reshape(codes, (T, PAIRS, 2)))
    low, high = tl.inline_asm_elementwise(
        HOW.PERMUTE, "=&r,=&r,=&r,=&r,r" + ",r" * 32,
        [first | (second << 4), words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip
    return tl.interleave(low, high)


@jit
def _scales(scale_ptr: tl.tensor, slots: tl.tensor, there: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """The scales of tokens at `slots` as they are stored, [T,groups of BLOCK_D]."""
    GROUPS: tl.constexpr = HOW.BLOCK_D // HOW.GROUP
    group = tl.arange(0, GROUPS)
    at = scale_ptr + slots[:, None] * HOW.SCALES + group[None, :]
    return tl.load(at, mask=there[:, None] & (group < HOW.SCALES)[None, :], other=0)


@jit
def numbers_of(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, table: tl.tensor, slots: tl.tensor, there: tl.tensor,
    HOW: tl.constexpr, PRODUCTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The tokens at flat `slots` int64 [T] that are `there`, without the common factor: [T,BLOCK_D].

    table: from `table_words`.
    """
    codes = _codes(codes_ptr + slots * HOW.BYTES, there, HOW.BITS, HOW)
    if HOW.KIND == "e4m3":
        numbers = from_e4m3(codes, HOW.NATIVE)
    elif HOW.KIND == "integer":  # the bits of the float16 number 1024 + code + 128, as no integer is converted
        numbers = ((codes ^ 0x80).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif HOW.KIND == "zero point":
        numbers = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif HOW.KIND == "e2m1":  # the bits of a float16 that is 2^14 times as small
        bits = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
        numbers = bits.to(tl.float16, bitcast=True) * 16384.0
    elif HOW.PERMUTE is not None and tl.float16 == PRODUCTS:
        numbers = _looked_up(codes, table, HOW)
    else:
        numbers = tl.load(table + codes.to(tl.int32))
    numbers = numbers.to(PRODUCTS)
    if HOW.GROUP > 0:
        T: tl.constexpr = codes.shape[0]
        GROUPS: tl.constexpr = HOW.BLOCK_D // HOW.GROUP  # Triton 3.6 does not accept fields in a shape
        GROUP: tl.constexpr = HOW.GROUP
        BLOCK_D: tl.constexpr = HOW.BLOCK_D
        scale = _scales(scale_ptr, slots, there, HOW)
        if HOW.KIND == "zero point":
            bits = scale.to(tl.int32, bitcast=True)
            numbers -= (bits & 15).to(PRODUCTS)
            scale = (bits & -16).to(tl.float32, bitcast=True)
        if HOW.E4M3_SCALES:
            scale = from_e4m3(scale, HOW.NATIVE)
        grouped = tl.reshape(numbers, (T, GROUPS, GROUP))
        numbers = tl.reshape(grouped * scale.to(PRODUCTS)[:, :, None], (T, BLOCK_D))
    return numbers


# --- encoding --------------------------------------------------------------------------------------------------------
@jit
def _to_e4m3(x: tl.tensor) -> tl.tensor:
    """Float32 numbers as bytes of e4m3: to the nearest, ties to even, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    small = tl.minimum(tl.abs(x), 448.0)
    normal = small.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - 960
    tiny = (small + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2^-9
    return (tl.where(small < 0.015625, tiny, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def nearest(x: tl.tensor) -> tl.tensor:
    """Whole numbers below 2^22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@jit
def _half_away(x: tl.tensor) -> tl.tensor:
    """Whole numbers 0 to 15, halves away from zero."""
    x = tl.minimum(tl.maximum(x, 0.0), 15.0)
    whole = x.to(tl.int32).to(tl.float32)
    return whole + tl.where(x - whole >= 0.5, 1.0, 0.0)


@jit
def _to_e2m1(x: tl.tensor) -> tl.tensor:
    """Codes of e2m1, int32: to the nearest, ties to the even code."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32) + ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def _store_codes(ptr: tl.tensor, codes: tl.tensor, BITS: tl.constexpr, HOW: tl.constexpr) -> None:
    """Store codes int32 [BLOCK_D] as bytes: planes of powers of two, the lowest bits first."""
    WIDTH: tl.constexpr = 8 if BITS >= 8 else (4 if BITS >= 4 else (2 if BITS >= 2 else 1))
    EACH: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = (HOW.D * WIDTH + 7) // 8
    WORDS: tl.constexpr = HOW.BLOCK_D // EACH
    plane = tl.reshape(codes & ((1 << WIDTH) - 1), (WORDS, EACH))
    bytes = tl.sum(plane << (tl.arange(0, EACH) * WIDTH)[None, :], 1)
    column = tl.arange(0, WORDS)
    tl.store(ptr + column, bytes.to(tl.uint8), mask=column < BYTES)
    if BITS > WIDTH:
        _store_codes(ptr + BYTES, codes >> WIDTH, BITS - WIDTH, HOW)


@jit
def rotated(ptr: tl.tensor, stride: tl.tensor, rotation: View, D: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """A vector x of D numbers times a matrix [D,D]: sum_i x_i M_(i,j), float32 [BLOCK_D]; or x itself, without one."""
    dims = tl.arange(0, BLOCK_D)
    if rotation is None:
        found = tl.load(ptr + dims * stride, mask=dims < D, other=0.0).to(tl.float32)
    else:
        PART: tl.constexpr = min(BLOCK_D, 32)
        found = dims * 0.0
        for first in tl.static_range(0, BLOCK_D, PART):
            some = first + tl.arange(0, PART)
            x = tl.load(ptr + some * stride, mask=some < D, other=0.0).to(tl.float32)
            at = rotation.ptr + some[None, :] * rotation.row + dims[:, None] * rotation.dim
            matrix = tl.load(at, mask=(some < D)[None, :] & (dims < D)[:, None], other=0.0)
            found += tl.sum(matrix * x[None, :], 1)
    return found


@jit
def encode(
    x: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, table_ptr: tl.tensor, factor: tl.tensor,
    place: tl.tensor, HOW: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr, TRUNCATED: tl.constexpr,
) -> None:  # fmt: skip
    """Encode a new vector, float32 [BLOCK_D] and 0 behind its D numbers, into flat slot `place`."""
    dims = tl.arange(0, HOW.BLOCK_D)
    there = dims < HOW.D
    codes_ptr += place * HOW.BYTES
    scale_ptr += place * HOW.SCALES
    if HOW.KIND == "e4m3" or HOW.KIND == "integer":
        if HOW.GROUP > 0:
            own = tl.maximum(tl.math.div_rn(tl.max(tl.abs(x), 0), LEVELS + x * 0), LEAST)
            tl.store(scale_ptr + dims, own, mask=dims < 1)
            x = x * tl.math.div_rn(1.0 + x * 0, own)
        else:
            x = tl.math.div_rn(x, factor + x * 0)
        if HOW.KIND == "e4m3":
            codes = _to_e4m3(x).to(tl.int32)
        else:
            x = tl.minimum(tl.maximum(x, -128.0), 127.0)
            codes = (x if TRUNCATED else nearest(x)).to(tl.int32) & 255
    elif HOW.KIND == "zero point":
        low = tl.min(tl.where(there, x, float("inf")), 0) + x * 0
        high = tl.max(tl.where(there, x, float("-inf")), 0) + x * 0
        own = tl.maximum(tl.math.div_rn(high - low, LEVELS + x * 0), LEAST)
        zero = _half_away(tl.math.div_rn(-low, own))
        codes = _half_away(x * tl.math.div_rn(1.0 + x * 0, own) + zero).to(tl.int32)
        bits = (own.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
        tl.store(scale_ptr + dims, bits.to(tl.float32, bitcast=True), mask=dims < 1)
    elif HOW.KIND == "e2m1":
        GROUPS: tl.constexpr = HOW.BLOCK_D // HOW.GROUP
        GROUP: tl.constexpr = HOW.GROUP
        BLOCK_D: tl.constexpr = HOW.BLOCK_D
        blocks = tl.reshape(x, (GROUPS, GROUP))
        most = tl.max(tl.abs(blocks), 1)
        own = _to_e4m3(tl.math.div_rn(most, LEVELS * factor + most * 0))
        group = tl.arange(0, GROUPS)
        tl.store(scale_ptr + group, own, mask=group < HOW.SCALES)
        step = (from_e4m3(own, HOW.NATIVE).to(tl.float32) * factor)[:, None] + blocks * 0
        blocks = tl.where(step == 0, 0.0, tl.math.div_rn(blocks, tl.where(step == 0, 1.0, step)))
        codes = _to_e2m1(tl.reshape(blocks, (BLOCK_D,)))
    else:
        norm = tl.sqrt_rn(tl.sum(x * x, 0))
        tl.store(scale_ptr + dims, (norm + x * 0).to(tl.float16), mask=dims < 1)
        unit = tl.math.div_rn(x, tl.where(norm == 0, 1.0, norm) + x * 0)
        codes = dims * 0
        for level in range((1 << HOW.BITS) - 1):
            bound = (tl.load(table_ptr + level) + tl.load(table_ptr + level + 1)) / 2
            codes += (unit > bound).to(tl.int32)
    _store_codes(codes_ptr, codes, HOW.BITS, HOW)

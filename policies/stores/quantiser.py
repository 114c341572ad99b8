"""The group quantiser of all stores, and codes of a few bits packed in words or bytes.

Code j of an int32 word is at bits [b*j, b*j + b - 1], lowest bits first; a row that does not fill its last word ends in
zeros. Words are read as little-endian bytes. Source: the layout of KIVI's packing (jy-yuan/KIVI, quant/new_pack.py).

Shapes: n numbers of a group, W = ceil(n * b / 32) int32 words of their codes of b bits, F = 8 / b codes per byte.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, choice
from kvbench.policies.constants import is_checked

BITS = (2, 4, 8)
WORD = 32
TOGETHER = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # by bits: the integer as long as the F codes of a byte
NOT_FINITE = "keys or values to be quantised contain NaN or infinity"
Metadata = Literal["auto", "float16", "float32"]


@dataclass(frozen=True)
class Quantiser:
    """x = code * scale + minimum with scale = (max - min) / (2**bits - 1), per group along the last dimension.

    Scale and minimum are computed in float32 and rounded to their stored dtype; codes follow from the rounded ones, so
    that the error is at most half a step (and the rounding of the metadata). Halves round to even. In a constant
    group, or where the scale underflows, codes are 0. metadata: dtype of scale and minimum; `auto` is float16 for
    16-bit tensors, else the tensor's dtype. fp16_arith: compute in the tensor's dtype instead, as KIVI's code does.
    """

    bits: int = 2
    metadata: Metadata = "auto"
    fp16_arith: bool = False

    def __post_init__(self) -> None:
        choice("bits", self.bits, *BITS)
        check_choices(self)

    def held_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of scale and minimum for tensors of `dtype`."""
        if self.metadata == "auto":
            return torch.float16 if dtype.itemsize == 2 else dtype
        return torch.float16 if self.metadata == "float16" else torch.float32

    def quantise(self, x: Tensor, dtype: torch.dtype | None = None, check: bool = True) -> dict[str, Tensor]:
        """Words [..., W] int32, scale and minimum [...] of groups [..., n], by name.

        dtype: of the model, if x was computed in a wider one.
        check: raise ValueError for numbers that are not finite or do not fit the metadata; the host waits for a GPU.
        """
        held_in = self.held_in(dtype or x.dtype)
        x = x if self.fp16_arith else widen(x)
        low, high = x.amin(-1), x.amax(-1)
        levels = 2**self.bits - 1
        scale, minimum = ((high - low) / levels).to(held_in), low.to(held_in)
        if check:
            check_range(low, high, scale, minimum)
        step = scale.to(x.dtype)
        # A step of zero divides by infinity: code 0 everywhere.
        codes = (x - minimum.to(x.dtype)[..., None]).div_(step.masked_fill(step == 0, torch.inf)[..., None])
        words = pack(codes.round_().clamp_(0, levels).to(torch.uint8), self.bits)
        return {"words": words, "scale": scale, "minimum": minimum}

    def dequantise(self, codes: Mapping[str, Tensor], count: int) -> Tensor:
        """The numbers [..., count] of `quantise`, in float32 (float16 under fp16_arith; float64 stays)."""
        scale = codes["scale"] if self.fp16_arith else widen(codes["scale"])
        numbers = unpack(codes["words"], self.bits, count).to(scale.dtype)
        return numbers.mul_(scale[..., None]).add_(codes["minimum"].to(scale.dtype)[..., None])

    # --- tokens of a layer -----------------------------------------------------------------------------------------
    def by_channel(self, x: Tensor, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Codes of tokens [B,H,N,D] in groups of `group` tokens: words [B,H,N/G,D,W], scale, minimum [B,H,N/G,D]."""
        return self.quantise(x.unflatten(2, (-1, group)).mT, dtype)

    def of_channels(self, codes: Mapping[str, Tensor], group: int) -> Tensor:
        """The tokens of `by_channel` in their groups, [B,H,N/G,G,D]."""
        return self.dequantise(codes, group).mT

    def by_token(self, x: Tensor, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Codes of tokens [B,H,N,D] in groups of `group` channels: words [B,H,N,D/G,W], scale, minimum [B,H,N,D/G]."""
        return self.quantise(x.unflatten(3, (-1, group)), dtype, is_checked(x))

    def of_tokens(self, codes: Mapping[str, Tensor], group: int) -> Tensor:
        """The tokens of `by_token`, [B,H,N,D]."""
        return self.dequantise(codes, group).flatten(-2)


def joined(x: Tensor) -> Tensor:
    """Tokens [B,H,N,D] with the channels of all heads, [B,1,N,H*D]."""
    return x.transpose(1, 2).flatten(2)[:, None]


def parted(x: Tensor, dim: int) -> Tensor:
    """The inverse of `joined`; dim: D."""
    parts: Tensor = x[:, 0].unflatten(-1, (-1, dim)).transpose(1, 2)
    return parts


def check_range(low: Tensor, high: Tensor, scale: Tensor, minimum: Tensor) -> None:
    """ValueError if the smallest and largest numbers of a group, or its metadata, are not finite."""
    if low.is_meta or math.isfinite(float(scale.sum(dtype=torch.float64) + minimum.sum(dtype=torch.float64))):
        return
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError(NOT_FINITE)
    largest = float(torch.maximum(low.abs(), high.abs()).max())
    held_in = str(scale.dtype).removeprefix("torch.")
    raise ValueError(f"keys or values up to {largest:.3g} do not fit {held_in} scales and minima: use metadata=float32")


def words_for(count: int, bits: int) -> int:
    """The number of int32 words of `count` codes of `bits` bits."""
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n], each below 2**bits, as int32 words [..., W]."""
    count = codes.shape[-1]
    missing = words_for(count, bits) * WORD // bits - count
    codes = torch.nn.functional.pad(codes, (0, missing)).contiguous()
    if bits == 8:
        return codes.view(torch.int32)
    # The codes of a byte, read as one integer, times this factor have that byte on top: 15 times as fast as adding up.
    each = 8 // bits
    factor = sum(1 << (8 * (each - 1) - (8 - bits) * j) for j in range(each))
    packed = (codes.view(TOGETHER[bits]) * factor).view(torch.uint8)[..., each - 1 :: each]
    return packed.contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row: int32 words [..., W] -> uint8 [..., count]."""
    return _codes(words.contiguous().view(torch.uint8), bits, count)


def _codes(held: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of bytes [..., W], uint8 [..., count]."""
    if bits < 8:  # one look-up per byte: twice as fast as shifts and masks
        found = _codes_of_bytes(bits, held.device).index_select(0, held.flatten().int())
        held = found.view(held.shape).view(torch.uint8)
    return held[..., :count]


@lru_cache
def _codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """[256]: the F codes of every byte, one code in each byte of an integer."""
    with torch.inference_mode(False):  # an inference tensor could not be used outside of inference mode
        shifts = torch.arange(0, 8, bits)
        codes = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
        found: Tensor = codes.to(torch.uint8).view(TOGETHER[bits]).flatten().to(device)
        return found


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [...,D] of any number of bits as bytes [...,W]: D * bits / 8 of them if 8 divides D."""
    parts = []
    for width in _widths(bits):
        plane = codes & (2**width - 1)
        parts.append(pack(plane, width).view(torch.uint8)[..., : -(-codes.shape[-1] * width // 8)])
        codes = codes >> width if width < 8 else codes
    return torch.cat(parts, dim=-1)


def from_bytes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `to_bytes`: bytes [...,W] -> uint8 codes [...,D]."""
    widths = _widths(bits)
    parts = packed.split([-(-dim * width // 8) for width in widths], dim=-1)
    found, low = _codes(parts[0], widths[0], dim), widths[0]
    for width, part in zip(widths[1:], parts[1:], strict=True):
        found, low = found | _codes(part, width, dim) << low, low + width
    return found


def look_up(packed: Tensor, bits: int, table: Tensor, dim: int) -> Tensor:
    """The number in `table` [2^bits] of each code: bytes [...,W] of `to_bytes` -> [...,D]."""
    if bits != 4:
        return table.index_select(0, from_bytes(packed, bits, dim).flatten().int()).view(*packed.shape[:-1], dim)
    pairs = torch.view_as_complex(torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1))  # of each byte
    found = torch.view_as_real(pairs.index_select(0, packed.flatten().int()))
    return found.view(*packed.shape[:-1], -1)[..., :dim]


def _widths(bits: int) -> list[int]:
    """The powers of two that sum to `bits`: codes of 3 bits are packed as two bits and one."""
    return [width for width in (8, 4, 2, 1) if bits & width]

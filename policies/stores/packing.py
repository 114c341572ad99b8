"""Codes of 1, 2, 4 or 8 bits packed in int32 words.

Code j of a word is at bits [b*j, b*j + b - 1], lowest bits first; a row that does not fill its last word ends in zeros.
Words are read as little-endian bytes. Shapes: n codes of b bits, W = ceil(n * b / 32) words, F = 8 / b codes per byte.
Source: the layout of KIVI's packing (jy-yuan/KIVI, quant/new_pack.py).
"""

from functools import lru_cache

import torch
from torch import Tensor

WORD = 32
TOGETHER = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # by bits: the integer as long as the F codes of a byte


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
    held = words.contiguous().view(torch.uint8)
    if bits < 8:  # one look-up per byte: twice as fast as shifts and masks
        found = _codes_of_bytes(bits, words.device).index_select(0, held.flatten().int())
        held = found.view(*held.shape).view(torch.uint8)
    return held[..., :count]


@lru_cache
def _codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """[256]: the F codes of every byte, one code in each byte of an integer."""
    with torch.inference_mode(False):  # an inference tensor could not be used outside of inference mode
        shifts = torch.arange(0, 8, bits)
        codes = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
        return codes.to(torch.uint8).view(TOGETHER[bits]).flatten().to(device)


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
    found, low = torch.zeros((), dtype=torch.uint8, device=packed.device), 0
    sizes = [-(-dim * width // 8) for width in _widths(bits)]
    for width, part in zip(_widths(bits), packed.split(sizes, dim=-1), strict=True):
        words = torch.nn.functional.pad(part, (0, -part.shape[-1] % 4)).contiguous().view(torch.int32)
        found, low = found | unpack(words, width, dim) << low, low + width
    return found


def _widths(bits: int) -> list[int]:
    """The powers of two that sum to `bits`: codes of 3 bits are packed as two bits and one."""
    return [width for width in (8, 4, 2, 1) if bits & width]

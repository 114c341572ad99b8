"""Codes of 1, 2, 4 or 8 bits in int32 words: code j of a word lies at bits [b*j, b*j + b - 1], lowest bits first.

Source: the layout of KIVI's packing (jy-yuan/KIVI, quant/new_pack.py). A row that does not fill its last word ends in
zero bits. Words are read as little-endian bytes. n codes, W = ceil(n * b / 32) words, F = 8 / b codes per byte.
"""

import torch
from torch import Tensor

WORD = 32
_MASKS = {1: 0x01010101, 2: 0x03030303, 4: 0x0F0F0F0F, 8: -1}
"""The lowest code of every byte of a word."""


def words_for(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n], each below 2**bits, as int32 words [..., W]."""
    count = codes.shape[-1]
    missing = words_for(count, bits) * WORD // bits - count
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    parts = codes.unflatten(-1, (-1, 8 // bits))
    packed = parts[..., 0].contiguous()
    for place in range(1, 8 // bits):
        packed |= parts[..., place] << (bits * place)
    return packed.view(torch.int32)


def planes(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., W] as uint8 codes [..., F, 4W]: code i of a row lies at plane i % F, place i // F.

    This order costs one shift and one mask on words, four times fewer operations than code by code; what reads the
    codes as one side of a matrix product puts the (much smaller) other side or the result into this order instead.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., None, :]
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=words.device)[:, None]
    return ((words[..., None, :] >> shifts) & _MASKS[bits]).view(torch.uint8)


def in_planes(x: Tensor, bits: int) -> Tensor:
    """Put a dimension of n numbers, [..., n], into the order of `planes`, [..., F * 4W]; filled up with zeros."""
    count = x.shape[-1]
    missing = words_for(count, bits) * WORD // bits - count
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.unflatten(-1, (-1, 8 // bits)).transpose(-1, -2).flatten(-2)


def from_planes(x: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `in_planes`: [..., F * 4W] -> [..., count]."""
    return x.unflatten(-1, (8 // bits, -1)).transpose(-1, -2).flatten(-2)[..., :count]


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row: int32 words [..., W] -> uint8 [..., count]."""
    return from_planes(planes(words, bits).flatten(-2), bits, count)

"""Codes of 1, 2, 4 or 8 bits packed in int32 words, and matrix products with them that build no numbers.

Code j of a word lies at bits [b*j, b*j + b - 1], lowest bits first.

Source: the layout of KIVI's packing (jy-yuan/KIVI, quant/new_pack.py). A row that does not fill its last word ends in
zero bits. Words are read as little-endian bytes. n codes, W = ceil(n * b / 32) words, F = 8 / b codes per byte.
Shapes: R rows of n codes each, in words [...,R,W]; r rows of numbers.
"""

from functools import lru_cache

import torch
from torch import Tensor

WORD = 32
SHORT = 2  # rows of up to so many words are unpacked code by code: slower to unpack, faster to multiply
_GATHER = {
    bits: (together, sum(1 << (8 * (count - 1) - (8 - bits) * j) for j in range(count)))
    for bits, count, together in ((1, 8, torch.int64), (2, 4, torch.int32), (4, 2, torch.int16))
}


def words_for(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n], each below 2**bits, as int32 words [..., W]."""
    count = codes.shape[-1]
    missing = words_for(count, bits) * WORD // bits - count
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    codes = codes.contiguous()
    if bits == 8:
        return codes.view(torch.int32)
    # The codes of a byte, read as one integer, times this factor have that byte on top: 15 times as fast as adding up.
    together, factor = _GATHER[bits]
    packed = (codes.view(together) * factor).view(torch.uint8)[..., 8 // bits - 1 :: 8 // bits]
    return packed.contiguous().view(torch.int32)


def planes(words: Tensor, bits: int) -> Tensor:
    """int32 words [...,R,W] as uint8 codes [...,F,R,4W], those of plane j times 2**(b*j).

    A row's code i lies at plane i % F, place i // F.
    Codes that keep their place in a byte cost one mask per word: shifts are ten times as slow (CPU), and so are masks
    of a few words at a time. A matrix product over planes brings its other side (`in_planes`) or its result
    (`from_planes`) into this order and divides by the factors: both are much smaller than the codes.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., None, :, :]
    return (words[..., None, :, :] & _masks(bits, words.device)).view(torch.uint8)


def by_row(words: Tensor, bits: int) -> Tensor:
    """int32 words [...,R,W] as uint8 codes [...,R,F*4W]: as `planes`, but every row has all its planes side by side.

    Faster than `planes` to multiply with, slower to unpack: for rows of one or two words only.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    wide = words.contiguous() if words.shape[-1] == 1 else words.contiguous().view(torch.int64)
    return (wide & _wide_masks(bits, words.shape[-1], words.device)).view(torch.uint8)


def in_planes(x: Tensor, bits: int) -> Tensor:
    """Numbers [...,r,n] in the order of `planes`, [...,F,r,4W], the other side of a product over planes."""
    count = x.shape[-1]
    missing = words_for(count, bits) * WORD // bits - count
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    parts: Tensor = x.unflatten(-1, (-1, 8 // bits)).movedim(-1, -3)
    return parts * _factors(bits, x.device, x.dtype)


def from_planes(x: Tensor, bits: int, count: int) -> Tensor:
    """Products with the codes of `planes`, [...,F,r,4W], in the order of the codes: [...,r,count]."""
    return (x * _factors(bits, x.device, x.dtype)).movedim(-3, -1).flatten(-2)[..., :count]


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row: int32 words [..., W] -> uint8 [..., count]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)[:, None, None]
    return (planes(words[..., None, :], bits) >> shifts).movedim(-3, -1).flatten(-3)[..., :count]


def times_codes(x: Tensor, words: Tensor, bits: int, count: int) -> Tensor:
    """x [...,r,R] times codes [...,R,count]: [...,r,count]."""
    if words.shape[-1] <= SHORT:
        return in_order(x @ by_row(words, bits).to(x.dtype), bits, count)
    return from_planes(x[..., None, :, :] @ planes(words, bits).to(x.dtype), bits, count)


def times_codes_transposed(x: Tensor, words: Tensor, bits: int) -> Tensor:
    """x [...,r,n] times the transpose of codes [...,R,n]: [...,r,R]."""
    parts = in_planes(x, bits)
    if words.shape[-1] <= SHORT:
        return parts.transpose(-3, -2).flatten(-2) @ by_row(words, bits).to(x.dtype).transpose(-1, -2)
    return (parts @ planes(words, bits).to(x.dtype).transpose(-1, -2)).sum(-3)


def in_order(x: Tensor, bits: int, count: int) -> Tensor:
    """Products with the codes of `by_row`, [...,r,F*4W], in the order of the codes: [...,r,count]."""
    return from_planes(x.unflatten(-1, (8 // bits, -1)).transpose(-3, -2), bits, count)


def scaled(words: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes of rows [...,R,g,W] in g groups, in the order of `by_row`, times scale [...,R,g]: [...,R,g,F*4W]."""
    return by_row(words, bits).to(scale.dtype).mul_(scale[..., None])


@lru_cache
def _masks(bits: int, device: torch.device) -> Tensor:
    """[F,1,1] int32: plane j's codes in all four bytes of a word."""
    lowest = (1 << bits) - 1
    bytes_ = torch.tensor([[lowest << j] * 4 for j in range(0, 8, bits)], dtype=torch.uint8)
    return bytes_.view(torch.int32)[..., None].to(device)


@lru_cache
def _wide_masks(bits: int, words: int, device: torch.device) -> Tensor:
    """[F] int32 or int64: plane j's codes in all bytes of one or two words."""
    return _masks(bits, device).repeat(1, 1, words).view(torch.int64 if words == 2 else torch.int32).flatten()


@lru_cache
def _factors(bits: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[F,1,1] 1 / 2**(b * plane)."""
    return torch.tensor([[[2.0**-j]] for j in range(0, 8, bits)], dtype=dtype, device=device)

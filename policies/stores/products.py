"""Matrix products with packed codes, without building the numbers they stand for.

Shapes: R rows of n codes each, in words [...,R,W] (see packing); r rows of numbers; F = 8 / bits codes per byte.
"""

from torch import Tensor

from kvbench.policies.stores.packing import by_row, from_planes, in_planes, planes

SHORT = 2  # words of a row up to which all its codes are unpacked next to each other: the wider matrices pay for it


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

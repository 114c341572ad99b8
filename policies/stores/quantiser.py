"""The group quantiser of all stores: asymmetric min-max, with a scale and a minimum for each group.

Shapes: n numbers of a group, W int32 words of their codes (see `packing`).
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, choice
from kvbench.policies.stores.packing import pack, unpack

BITS = (2, 4, 8)
NOT_FINITE = "keys or values to be quantised contain NaN or infinity"
Metadata = Literal["auto", "float16", "float32"]


class Group(NamedTuple):
    """Quantised groups: words [..., W] int32, scale and minimum [...]."""

    words: Tensor
    scale: Tensor
    minimum: Tensor


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

    def quantise(self, x: Tensor, dtype: torch.dtype | None = None) -> Group:
        """Quantise groups [..., n]; `dtype` is the model's, if x was computed in a wider one.

        Raises ValueError for numbers that are not finite or do not fit the metadata.
        """
        held_in = self.held_in(dtype or x.dtype)
        x = x if self.fp16_arith else widen(x)
        low, high = x.amin(-1), x.amax(-1)
        levels = 2**self.bits - 1
        scale, minimum = ((high - low) / levels).to(held_in), low.to(held_in)
        check_range(low, high, scale, minimum)
        step = scale.to(x.dtype)
        # A step of zero divides by infinity: code 0 everywhere.
        codes = (x - minimum.to(x.dtype)[..., None]).div_(step.masked_fill(step == 0, torch.inf)[..., None])
        return Group(pack(codes.round_().clamp_(0, levels).to(torch.uint8), self.bits), scale, minimum)

    def dequantise(self, group: Group, count: int) -> Tensor:
        """The dequantised numbers [..., count], in float32 (float16 under fp16_arith; float64 stays)."""
        scale = group.scale if self.fp16_arith else widen(group.scale)
        numbers = unpack(group.words, self.bits, count).to(scale.dtype)
        return numbers.mul_(scale[..., None]).add_(group.minimum.to(scale.dtype)[..., None])


def check_range(low: Tensor, high: Tensor, scale: Tensor, minimum: Tensor) -> None:
    """ValueError if the smallest and largest numbers of a group, or its metadata, are not finite."""
    if low.is_meta or math.isfinite(float(scale.sum(dtype=torch.float64) + minimum.sum(dtype=torch.float64))):
        return
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError(NOT_FINITE)
    largest = float(torch.maximum(low.abs(), high.abs()).max())
    held_in = str(scale.dtype).removeprefix("torch.")
    raise ValueError(f"keys or values up to {largest:.3g} do not fit {held_in} scales and minima: use metadata=float32")

"""The one place that imports Triton, so that every kernel file can be read where Triton has no wheels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # wheels exist for Linux only; the PyTorch paths need none
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "View",
    "at_head",
    "fit_heads",
    "jit",
    "next_power_of_two",
    "of_head",
    "require_triton",
    "rows",
]
__all__ += ["tl", "triton", "use_triton", "view"]

LARGEST_HEAD = 256
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class View(NamedTuple):
    """A tensor [B,H,T,D] as kernels take it, and its strides; 0 for dimensions that it has not."""

    ptr: Tensor
    batch: int
    head: int
    row: int = 0
    dim: int = 0


def view(x: Tensor) -> View:
    """x, whose first dimensions are B, H, T and D."""
    return View(x, *x.stride())


def rows(x: Tensor) -> View:
    """x, or a copy of it, with the numbers of its last dimension side by side."""
    return view(x if x.stride(-1) == 1 else x.contiguous())


def use_triton(x: Tensor) -> bool:
    """Whether kernels run as Triton: on CUDA tensors, and all where it is interpreted; float64 stays with PyTorch."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def jit(function: Callable[..., Any], varying: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """`triton.jit`; the function itself where Triton is missing: `require_triton` stands before every launch.

    varying: arguments whose values change from step to step; a kernel is not compiled anew for those divisible by 16.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def require_triton(kernel: str, device: object) -> None:
    """ValueError where Triton is missing."""
    if triton is None:
        raise ValueError(f"{kernel} on device {device} needs Triton, which is not installed here; use device=cpu")


def fit_heads(kernel: str, *dims: int) -> None:
    """ValueError for heads of more numbers than a program's tiles hold."""
    if max(dims) > LARGEST_HEAD:
        raise ValueError(f"{kernel} takes a head_dim of at most {LARGEST_HEAD}, got {max(dims)}; use device=cpu")


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, for n >= 1: tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


@jit
def at_head(x: tl.tensor, row: tl.tensor, heads: tl.tensor) -> tl.tensor:
    """Where KV head `row` of B * heads begins in a `View`."""
    return x.ptr + row // heads * x.batch + row % heads * x.head


@jit
def of_head(x: View | None, row: tl.tensor, heads: tl.tensor, first: tl.tensor) -> View | None:
    """What KV head `row` has of x, from slot `first` on; None of None."""
    own = None
    if x is not None:
        own = View(at_head(x, row, heads) + first * x.row, 0, 0, x.row, x.dim)
    return own

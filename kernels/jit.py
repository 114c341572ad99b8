"""The one place that imports Triton, so that every kernel file can be read where Triton has no wheels."""

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

__all__ = ["INTERPRETED", "Strides", "fit_heads", "jit", "next_power_of_two", "require_triton", "strides", "tl"]
__all__ += ["triton", "use_triton"]

LARGEST_HEAD = 256
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Strides(NamedTuple):
    """Of a tensor [B,H,T,D], as kernels take them; 0 for dimensions that it has not."""

    batch: int
    head: int
    row: int = 0
    dim: int = 0


def strides(x: Tensor) -> Strides:
    """Those of x, whose first dimensions are B, H, T and D."""
    return Strides(*x.stride())


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

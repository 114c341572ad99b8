# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Statistics of an observation window over a long prompt, beside the rows that PyTorch builds for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import H_KV, H_Q, call_of, dtype_name, scaled
from torch import Tensor

from kvbench.kernels.window_statistics import window_statistics_ref, window_statistics_triton
from kvbench.tools.bench.kernels import KernelCase

SHAPES = [(32, slots, 128, torch.bfloat16) for slots in (4096, 32768, 131072)]
SHAPES += [(8, 32768, 128, torch.bfloat16), (64, 32768, 128, torch.bfloat16), (32, 32768, 80, torch.float16)]
SHAPES += [(32, 16384, 256, torch.bfloat16), (32, 16384, 128, torch.float32)]


def setup(device: torch.device, **sizes: Any) -> dict[str, Any]:
    call = call_of(device, **sizes)
    del call["values"]
    return call


def rows(**call: Any) -> Tensor:
    return torch.cat(window_statistics_ref(**call))


def ours(**call: Any) -> Tensor:
    return torch.cat(window_statistics_triton(**call))


def sums_of_rows(**call: Any) -> Tensor:
    return window_statistics_ref(**call).sums


def sums(**call: Any) -> Tensor:
    return window_statistics_triton(**call, spread=False).sums


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """bytes_moved: the keys twice, since a row's sum must be known before its weights; flops: the products of both."""
    for window, whole, dim, dtype in SHAPES:
        slots = scaled(whole, scale)
        keys = H_KV * slots * dim * dtype.itemsize
        for kind, reference, triton, results in (("sums", sums_of_rows, sums, 1), ("all", rows, ours, 3)):
            yield KernelCase(
                "window_statistics",
                f"{kind} w={window} T={slots} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}",
                partial(setup, queries=window, slots=slots, dim=dim, dtype=dtype),
                {"rows": reference, "triton": triton},
                bytes_moved=2 * keys + 4 * results * H_Q * slots,
                flops=4 * window * H_Q * slots * dim,
            )

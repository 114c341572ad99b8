"""CAOTE's errors over a layer's values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import KernelCase, scaled

from kvbench.kernels.value_errors import value_errors_ref, value_errors_triton

HEADS, DIM = 8, 128  # KV heads of an 8B model


def setup(device: torch.device, batch: int, rows: int, slots: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(batch, HEADS, slots, DIM, generator=random)
    scores = torch.rand(batch, HEADS, rows, slots, generator=random)
    return {"scores": scores.to(device), "values": values.to(device, torch.bfloat16)}


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """A decoding step at a budget of 1,024, alone and in a batch; blocks and prompts; every query head of a group."""
    for batch, rows, stored in ((1, 1, 1024), (32, 1, 1024), (1, 1, 32768), (8, 1, 32768), (1, 4, 32768)):
        slots = scaled(stored, scale)
        for from_mean in (False, True):
            how = {"counted": None, "eps": 1e-6, "from_mean": from_mean}
            yield KernelCase(
                "fastcaote" if from_mean else "caote",
                f"[{batch},{HEADS},{rows},{slots}] x {DIM}, bf16",
                partial(setup, batch=batch, rows=rows, slots=slots),
                {"reference": partial(value_errors_ref, **how), "triton": partial(value_errors_triton, **how)},
                bytes_moved=batch * HEADS * slots * (2 * DIM + 2 * 4 * rows),
                flops=batch * HEADS * slots * DIM * 5 * rows,
                tolerance=1e-4,
            )

"""CAOTE's errors over a layer's values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, normal, scaled

from kvbench.kernels.value_errors import value_errors_ref, value_errors_triton
from kvbench.tools.bench.kernels import KernelCase


def setup(device: torch.device, batch: int, rows: int, slots: int) -> dict[str, Any]:
    scores = torch.rand(batch, H_KV, rows, slots, generator=torch.Generator().manual_seed(0))
    return {"scores": scores.to(device), "values": normal(device, batch, H_KV, slots, DIM)}


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """A decoding step at a budget of 1,024, alone and in a batch; blocks and prompts; every query head of a group."""
    for batch, rows, stored in ((1, 1, 1024), (32, 1, 1024), (1, 1, 32768), (8, 1, 32768), (1, 4, 32768)):
        slots = scaled(stored, scale)
        for from_mean in (False, True):
            how = {"counted": None, "eps": 1e-6, "from_mean": from_mean}
            yield KernelCase(
                "fastcaote" if from_mean else "caote",
                f"[{batch},{H_KV},{rows},{slots}] x {DIM}, bf16",
                partial(setup, batch=batch, rows=rows, slots=slots),
                {"reference": partial(value_errors_ref, **how), "triton": partial(value_errors_triton, **how)},
                bytes_moved=batch * H_KV * slots * (2 * DIM + 2 * 4 * rows),
                flops=batch * H_KV * slots * DIM * 5 * rows,
                tolerance=1e-4,
            )

"""Append: the newest token of every sequence into flat storage, one launch beside one operation a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, normal, scaled
from torch import Tensor

from kvbench.kernels.append import append_ref, append_triton
from kvbench.tools.bench.kernels import KernelCase


def setup(device: torch.device, batch: int, capacity: int) -> dict[str, Any]:
    """Sequences of `capacity` slots in bf16 with one statistic; the token goes to the last slot."""
    count = batch * H_KV * capacity
    flat = {name: torch.zeros(count, DIM, dtype=torch.bfloat16, device=device) for name in ("keys", "values")}
    flat["positions"] = torch.zeros(count, dtype=torch.int32, device=device)
    flat["sums"] = torch.zeros(count, 1, device=device)
    new = normal(device, batch, H_KV, 1, DIM)
    tokens = {"keys": new, "values": -new, "positions": torch.full((batch, H_KV, 1), capacity, device=device)}
    starts = torch.arange(0, count, capacity, device=device).view(batch, H_KV)
    return {"flat": flat, "tokens": tokens, "starts": starts, "slots": torch.full_like(starts, capacity - 1)}


def appended(function: Callable[..., None], **call: Any) -> Tensor:  # noqa: ANN401
    function(**call)
    return call["flat"]["keys"]


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """One sequence, and as many as a sweep decodes together."""
    for batch in (1, 36, 256):
        capacity = scaled(1024, scale)
        yield KernelCase(
            "append",
            f"B={batch} H_kv={H_KV} D={DIM} T={capacity} bf16",
            partial(setup, batch=batch, capacity=capacity),
            {"pytorch": partial(appended, append_ref), "triton": partial(appended, append_triton)},
            bytes_moved=batch * H_KV * 2 * (2 * 2 * DIM + 4 + 4),
            tolerance=0.0,
        )

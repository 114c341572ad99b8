# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""D2O: the nearest kept token of a prompt's evicted ones, and the merge of a decoding step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, normal, scaled
from torch import Tensor

from kvbench.kernels.merge_one import merge_one_ref, merge_one_triton
from kvbench.kernels.nearest import nearest_ref, nearest_triton
from kvbench.tools.bench.kernels import KernelCase


def prompt(device: torch.device, evicted: int, kept: int) -> dict[str, Any]:
    gone, own = normal(device, 1, H_KV, evicted + kept, DIM).split([evicted, kept], dim=2)
    return {"gone": gone, "own": own, "present": torch.ones(1, H_KV, kept, dtype=torch.bool, device=device)}


def step(device: torch.device, batch: int, slots: int) -> dict[str, Any]:
    keys, values = normal(device, 2, batch, H_KV, slots, DIM)
    victims = torch.randint(0, slots, (batch, H_KV, 1), generator=torch.Generator().manual_seed(0))
    return {
        "keys": keys,
        "values": values,
        "positions": torch.arange(slots, dtype=torch.int32, device=device).expand(batch, H_KV, -1).contiguous(),
        "victims": victims.to(device),
        "threshold": torch.zeros(batch, H_KV, device=device),
        "beta": 0.7,
        "average": False,
    }


def similarity(function: Callable[..., Any], **call: Any) -> Tensor:
    """What may be compared: of nearly equal neighbours either may be the nearest."""
    best: Tensor = function(**call)[0]
    return best


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of 8k and 32k at a budget of 1,024; decoding at budgets of 1,024 and 16k."""
    for gone, own in ((7168, 1024), (31744, 1024), (26214, 6554)):
        evicted, kept = scaled(gone, scale), scaled(own, scale)
        yield KernelCase(
            "nearest",
            f"{evicted} of {kept}, [1,{H_KV},.,{DIM}] bf16",
            partial(prompt, evicted=evicted, kept=kept),
            {"reference": partial(similarity, nearest_ref), "triton": partial(similarity, nearest_triton)},
            bytes_moved=H_KV * ((evicted + kept) * 2 * DIM + 12 * evicted),
            flops=2 * H_KV * evicted * kept * DIM,
            tolerance=1e-4,
        )
    for batch, stored in ((1, 1024), (32, 1024), (1, 16384)):
        slots = scaled(stored, scale)
        yield KernelCase(
            "merge_one",
            f"[{batch},{H_KV},{slots},{DIM}] bf16",
            partial(step, batch=batch, slots=slots),
            {"reference": partial(similarity, merge_one_ref), "triton": partial(similarity, merge_one_triton)},
            bytes_moved=batch * H_KV * slots * (2 * DIM + 4),
            tolerance=1e-4,
        )

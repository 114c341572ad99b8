"""D2O: the nearest kept token of a prompt's evicted ones, and the merge of a decoding step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import KernelCase, scaled
from torch import Tensor

from kvbench.kernels.merge_one import merge_one_ref, merge_one_triton
from kvbench.kernels.nearest import nearest_ref, nearest_triton

HEADS, DIM = 8, 128  # KV heads of an 8B model


def prompt(device: torch.device, evicted: int, kept: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    gone, own = (torch.randn(1, HEADS, n, DIM, generator=random).to(device, torch.bfloat16) for n in (evicted, kept))
    return {"gone": gone, "own": own, "present": torch.ones(1, HEADS, kept, dtype=torch.bool, device=device)}


def step(device: torch.device, batch: int, slots: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(batch, HEADS, slots, DIM, generator=random).to(device, torch.bfloat16) for _ in "kv")
    return {
        "keys": keys,
        "values": values,
        "positions": torch.arange(slots, dtype=torch.int32, device=device).expand(batch, HEADS, -1).contiguous(),
        "victims": torch.randint(0, slots, (batch, HEADS, 1), generator=random).to(device),
        "threshold": torch.zeros(batch, HEADS, device=device),
        "beta": 0.7,
        "average": False,
    }


def similarity(matched: Any) -> Tensor:  # noqa: ANN401 - a match or a merge
    """What may be compared: of nearly equal neighbours either may be the nearest."""
    best: Tensor = matched[0]
    return best


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of 8k and 32k at a budget of 1,024; decoding at budgets of 1,024 and 16k."""
    for gone, own in ((7168, 1024), (31744, 1024), (26214, 6554)):
        evicted, kept = scaled(gone, scale), scaled(own, scale)
        yield KernelCase(
            "nearest",
            f"{evicted} of {kept}, [1,{HEADS},.,{DIM}] bf16",
            partial(prompt, evicted=evicted, kept=kept),
            {
                "reference": lambda **call: similarity(nearest_ref(**call)),
                "triton": lambda **call: similarity(nearest_triton(**call)),
            },
            bytes_moved=HEADS * ((evicted + kept) * 2 * DIM + 12 * evicted),
            flops=2 * HEADS * evicted * kept * DIM,
            tolerance=1e-4,
        )
    for batch, stored in ((1, 1024), (32, 1024), (1, 16384)):
        slots = scaled(stored, scale)
        yield KernelCase(
            "merge_one",
            f"[{batch},{HEADS},{slots},{DIM}] bf16",
            partial(step, batch=batch, slots=slots),
            {
                "reference": lambda **call: similarity(merge_one_ref(**call)),
                "triton": lambda **call: similarity(merge_one_triton(**call)),
            },
            bytes_moved=batch * HEADS * slots * (2 * DIM + 4),
            tolerance=1e-4,
        )

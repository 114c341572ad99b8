"""Compaction: what is kept of a layer moves into tensors of its new size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, normal, scaled
from torch import Tensor

from kvbench.kernels.compaction import compact_ref, compact_triton, kept_slots_ref, kept_slots_triton
from kvbench.tools.bench.kernels import KernelCase


def setup(device: torch.device, slots: int, keep: int) -> dict[str, Any]:
    """A layer in bf16 with one statistic; `keep` slots of every head stay, drawn at random."""
    chosen = torch.rand(1, H_KV, slots, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :keep]
    mask = torch.zeros(1, H_KV, slots, dtype=torch.bool).scatter_(-1, chosen, True)
    keys = normal(device, 1, H_KV, slots, DIM)
    positions = torch.arange(slots, dtype=torch.int32, device=device).expand(1, H_KV, -1).contiguous()
    sums = torch.rand(1, H_KV, slots, 1, device=device)
    buffers = {"keys": keys, "values": keys.clone(), "positions": positions, "sums": sums}
    return {"buffers": buffers, "mask": mask.to(device), "keep": keep}


def by_pytorch(buffers: dict[str, Tensor], mask: Tensor, keep: int) -> Tensor:
    """A stable sort, then one gather a tensor and one more copy to make room."""
    return compact_ref(buffers, *kept_slots_ref(mask, keep), spare=1)["keys"]


def by_triton(buffers: dict[str, Tensor], mask: Tensor, keep: int) -> Tensor:
    """Two launches."""
    return compact_triton(buffers, *kept_slots_triton(mask, keep), spare=1)["keys"]


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of 32k and 128k down to budgets of 1,024 and a fifth."""
    for slots in (scaled(32768, scale), scaled(131072, scale)):
        for keep in (min(1024, slots // 2), slots // 5):
            yield KernelCase(
                "compact",
                f"[1,{H_KV},{slots},{DIM}] to {keep}, bf16",
                partial(setup, slots=slots, keep=keep),
                {"pytorch": by_pytorch, "triton": by_triton},
                bytes_moved=H_KV * (slots + 2 * keep * (2 * 2 * DIM + 4 + 4)),
                tolerance=0.0,
            )

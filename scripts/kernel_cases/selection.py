"""Selection: the kept slots of a prompt's scores, and the victim of a decoding step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import H_KV, scaled
from torch import Tensor

from kvbench.kernels.selection import select_triton, victim_triton
from kvbench.policies.select import select_by_sorting, victim_by_passes
from kvbench.tools.bench.kernels import KernelCase


def setup(device: torch.device, slots: int, based: bool) -> dict[str, Any]:
    """Scores of one sequence; rounded ones tie often, as pooled scores do, and the base score decides."""
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(1, H_KV, slots, generator=random)
    positions = torch.arange(slots, dtype=torch.int32).expand(1, H_KV, -1).contiguous()
    return {
        "scores": ((1000 * scores).round() if based else scores).to(device),
        "tie_break": torch.rand(1, H_KV, slots, generator=random).to(device) if based else None,
        "positions": positions.to(device),
        "protected": (positions >= slots - 32).to(device),
    }


def topk(scores: Tensor, keep: int, **_: object) -> Tensor:
    """The largest scores alone: neither what is protected nor ties are minded, so it is not compared."""
    return scores.topk(keep).indices


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of 8k to 128k at a budget of 1,024, and decoding at budgets of 1,024 to 64k."""
    for slots in (scaled(tokens, scale) for tokens in (8192, 32768, 131072)):
        keep = min(1024, slots // 2)
        for based in (False, True):
            yield KernelCase(
                "select",
                f"[1,{H_KV},{slots}] to {keep}{', ties by base score' if based else ''}",
                partial(setup, slots=slots, based=based),
                {
                    "pytorch": partial(select_by_sorting, keep=keep),
                    "triton": partial(select_triton, keep=keep, ascending=True),
                    "topk": partial(topk, keep=keep),
                },
                bytes_moved=H_KV * slots * (4 + 4 * based + 4 + 1 + 1),
                tolerance=0.0,
                beside=("topk",),
            )
    for slots in (scaled(budget, scale) for budget in (1024, 8192, 65536)):
        yield KernelCase(
            "victim",
            f"[1,{H_KV},{slots}]",
            partial(setup, slots=slots, based=True),
            {"pytorch": victim_by_passes, "triton": victim_triton},
            bytes_moved=H_KV * slots * (4 + 4 + 4 + 1),
            tolerance=0.0,
        )

"""What a cache does with its tokens: append, select, compact, judge by values, merge, quantise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, normal, provider, scaled
from torch import Tensor

from kvbench.kernels.append import append_ref, append_triton
from kvbench.kernels.compaction import compact_ref, compact_triton, kept_slots_ref, kept_slots_triton
from kvbench.kernels.merge_one import merge_one_ref, merge_one_triton
from kvbench.kernels.nearest import nearest_ref, nearest_triton
from kvbench.kernels.quantise import Filled, quantise_triton
from kvbench.kernels.selection import select_triton, victim_triton
from kvbench.kernels.value_errors import value_errors_ref, value_errors_triton
from kvbench.policies.select import select_by_sorting, victim_by_passes
from kvbench.policies.stores.quantiser import Quantiser
from kvbench.tools.bench.kernels import KernelCase

BITS = 2
QUANTISED = [(1, 32_768, 32), (1, 32_768, 128), (8, 32_768, 128), (32, 128, 128)]  # sequences, tokens, group


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of 8k to 128k at a budget of 1,024 or a fifth, and decoding steps."""
    size = partial(scaled, scale=scale)
    for batch in (1, 36, 256):  # one sequence, and as many as a sweep decodes together
        yield append(batch, size(1024))
    for slots in map(size, (8192, 32768, 131072)):
        for based in (False, True):
            yield select(slots, based)
    for slots in map(size, (1024, 8192, 65536)):
        yield victim(slots)
    for slots in map(size, (32768, 131072)):
        for keep in (min(1024, slots // 2), slots // 5):
            yield compact(slots, keep)
    for batch, rows, slots in ((1, 1, 1024), (32, 1, 1024), (1, 1, 32768), (8, 1, 32768), (1, 4, 32768)):
        for from_mean in (False, True):
            yield value_errors(batch, rows, size(slots), from_mean)
    for evicted, kept in ((7168, 1024), (31744, 1024), (26214, 6554)):
        yield nearest(size(evicted), size(kept))
    for batch, slots in ((1, 1024), (32, 1024), (1, 16384)):
        yield merge_one(batch, size(slots))
    for batch, tokens, unit in QUANTISED:
        for per_token in (False, True):
            for traced in (False, True):
                yield quantise(batch, size(tokens), unit, per_token, traced)


def _positions(device: torch.device, batch: int, slots: int) -> Tensor:
    return torch.arange(slots, dtype=torch.int32, device=device).expand(batch, H_KV, -1).contiguous()


# --- where tokens go --------------------------------------------------------------------------------------------------
def append(batch: int, capacity: int) -> KernelCase:
    """The newest token of every sequence into the last slot of flat storage: one launch, or one operation a tensor."""

    def setup(device: torch.device) -> dict[str, Any]:
        count = batch * H_KV * capacity
        flat = {name: torch.zeros(count, DIM, dtype=torch.bfloat16, device=device) for name in ("keys", "values")}
        flat["positions"] = torch.zeros(count, dtype=torch.int32, device=device)
        flat["sums"] = torch.zeros(count, 1, device=device)
        new = normal(device, batch, H_KV, 1, DIM)
        tokens = {"keys": new, "values": -new, "positions": torch.full((batch, H_KV, 1), capacity, device=device)}
        starts = torch.arange(0, count, capacity, device=device).view(batch, H_KV)
        return {"flat": flat, "tokens": tokens, "starts": starts, "slots": torch.full_like(starts, capacity - 1)}

    def appended(function: Any, **call: Any) -> Tensor:  # noqa: ANN401
        function(**call)
        return call["flat"]["keys"]

    return KernelCase(
        "append",
        f"B={batch} H_kv={H_KV} D={DIM} T={capacity} bf16",
        setup,
        {"pytorch": partial(appended, append_ref), "triton": partial(appended, append_triton)},
        bytes_moved=batch * H_KV * 2 * (2 * 2 * DIM + 4 + 4),
        tolerance=0.0,
    )


def compact(slots: int, keep: int) -> KernelCase:
    """What is kept of a layer in bf16 with one statistic, drawn at random, moves into tensors of its new size."""

    def setup(device: torch.device) -> dict[str, Any]:
        chosen = torch.rand(1, H_KV, slots, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :keep]
        mask = torch.zeros(1, H_KV, slots, dtype=torch.bool).scatter_(-1, chosen, True)
        keys = normal(device, 1, H_KV, slots, DIM)
        buffers = {"keys": keys, "values": keys.clone(), "positions": _positions(device, 1, slots)}
        buffers["sums"] = torch.rand(1, H_KV, slots, 1, device=device)
        return {"buffers": buffers, "mask": mask.to(device)}

    def by_pytorch(buffers: dict[str, Tensor], mask: Tensor) -> Tensor:
        """A stable sort, then one gather a tensor and one more copy to make room."""
        return compact_ref(buffers, *kept_slots_ref(mask, keep), spare=1)["keys"]

    def by_triton(buffers: dict[str, Tensor], mask: Tensor) -> Tensor:
        """Two launches."""
        return compact_triton(buffers, *kept_slots_triton(mask, keep), spare=1)["keys"]

    return KernelCase(
        "compact",
        f"[1,{H_KV},{slots},{DIM}] to {keep}, bf16",
        setup,
        {"pytorch": by_pytorch, "triton": by_triton},
        bytes_moved=H_KV * (slots + 2 * keep * (2 * 2 * DIM + 4 + 4)),
        tolerance=0.0,
    )


# --- which tokens -----------------------------------------------------------------------------------------------------
def scores(device: torch.device, slots: int, based: bool) -> dict[str, Any]:
    """Scores of one sequence; rounded ones tie often, as pooled scores do, and the base score decides."""
    random = torch.Generator().manual_seed(0)
    drawn, positions = torch.rand(1, H_KV, slots, generator=random), _positions(device, 1, slots)
    return {
        "scores": ((1000 * drawn).round() if based else drawn).to(device),
        "tie_break": torch.rand(1, H_KV, slots, generator=random).to(device) if based else None,
        "positions": positions,
        "protected": positions >= slots - 32,
    }


def select(slots: int, based: bool) -> KernelCase:
    """The kept slots of a prompt's scores. `topk` minds neither what is protected nor ties, so it is not compared."""
    keep = min(1024, slots // 2)
    return KernelCase(
        "select",
        f"[1,{H_KV},{slots}] to {keep}{', ties by base score' if based else ''}",
        partial(scores, slots=slots, based=based),
        {
            "pytorch": partial(select_by_sorting, keep=keep),
            "triton": partial(select_triton, keep=keep, ascending=True),
            "topk": lambda scores, **_: scores.topk(keep).indices,
        },
        bytes_moved=H_KV * slots * (4 + 4 * based + 4 + 1 + 1),
        tolerance=0.0,
        beside=("topk",),
    )


def victim(slots: int) -> KernelCase:
    """The token that a decoding step evicts."""
    return KernelCase(
        "victim",
        f"[1,{H_KV},{slots}]",
        partial(scores, slots=slots, based=True),
        {"pytorch": victim_by_passes, "triton": victim_triton},
        bytes_moved=H_KV * slots * (4 + 4 + 4 + 1),
        tolerance=0.0,
    )


def value_errors(batch: int, rows: int, slots: int, from_mean: bool) -> KernelCase:
    """CAOTE's errors over a layer's values: of a step, of blocks and prompts, of every query head of a group."""

    def setup(device: torch.device) -> dict[str, Any]:
        drawn = torch.rand(batch, H_KV, rows, slots, generator=torch.Generator().manual_seed(0))
        return {"scores": drawn.to(device), "values": normal(device, batch, H_KV, slots, DIM)}

    how = {"counted": None, "eps": 1e-6, "from_mean": from_mean}
    return KernelCase(
        "fastcaote" if from_mean else "caote",
        f"[{batch},{H_KV},{rows},{slots}] x {DIM}, bf16",
        setup,
        {"reference": partial(value_errors_ref, **how), "triton": partial(value_errors_triton, **how)},
        bytes_moved=batch * H_KV * slots * (2 * DIM + 2 * 4 * rows),
        flops=batch * H_KV * slots * DIM * 5 * rows,
        tolerance=1e-4,
    )


# --- D2O: similarities alone are compared, for of nearly equal neighbours either may be the nearest -------------------
def nearest(evicted: int, kept: int) -> KernelCase:
    """The nearest kept token of a prompt's evicted ones."""

    def setup(device: torch.device) -> dict[str, Any]:
        gone, own = normal(device, 1, H_KV, evicted + kept, DIM).split([evicted, kept], dim=2)
        return {"gone": gone, "own": own, "present": torch.ones(1, H_KV, kept, dtype=torch.bool, device=device)}

    similarity = itemgetter(0)
    return KernelCase(
        "nearest",
        f"{evicted} of {kept}, [1,{H_KV},.,{DIM}] bf16",
        setup,
        {"reference": provider(nearest_ref, similarity), "triton": provider(nearest_triton, similarity)},
        bytes_moved=H_KV * ((evicted + kept) * 2 * DIM + 12 * evicted),
        flops=2 * H_KV * evicted * kept * DIM,
        tolerance=1e-4,
    )


def merge_one(batch: int, slots: int) -> KernelCase:
    """The merge of a decoding step."""

    def setup(device: torch.device) -> dict[str, Any]:
        keys, values = normal(device, 2, batch, H_KV, slots, DIM)
        victims = torch.randint(0, slots, (batch, H_KV, 1), generator=torch.Generator().manual_seed(0))
        call = {"keys": keys, "values": values, "positions": _positions(device, batch, slots)}
        return {**call, "victims": victims.to(device), "threshold": torch.zeros(batch, H_KV, device=device)}

    ours = partial(provider, take=itemgetter(0), beta=0.7, average=False)
    return KernelCase(
        "merge_one",
        f"[{batch},{H_KV},{slots},{DIM}] bf16",
        setup,
        {"reference": ours(merge_one_ref), "triton": ours(merge_one_triton)},
        bytes_moved=batch * H_KV * slots * (2 * DIM + 4),
        tolerance=1e-4,
    )


# --- quantising -------------------------------------------------------------------------------------------------------
def quantise(batch: int, tokens: int, unit: int, per_token: bool, traced: bool) -> KernelCase:
    """A long prompt, or the group that decoding fills every 128 tokens; 3 tokens of every group are traced, or none.

    Scales are compared. Codes are compared bit by bit in the tests; PyTorch on CUDA divides by a constant with a
    product, which moves a scale by one in the last place and with it a few codes.
    """

    def setup(device: torch.device) -> dict[str, Any]:
        torch.manual_seed(0)
        x, filled = torch.randn(batch, H_KV, tokens, DIM, device=device, dtype=torch.bfloat16), None
        if traced:
            mask = torch.rand(batch, H_KV, tokens // unit, unit, device=device).argsort(-1) < 3
            filled = Filled(mask.flatten(2), x.float().unflatten(2, (-1, unit)).mean(3), unit)
        return {"x": x, "filled": filled}

    def pytorch(x: Tensor, filled: Filled | None) -> Tensor:
        """The quantiser of the stores, as on CPUs."""
        dtype = x.dtype
        if filled is not None:
            x = torch.where(filled.traced[..., None], filled.rows.repeat_interleave(filled.each, dim=2), x.float())
        groups = x.unflatten(3, (-1, unit)) if per_token else x.unflatten(2, (-1, unit)).transpose(-1, -2)
        return Quantiser(BITS).quantise(groups, dtype).scale

    numbers, side, pool = batch * H_KV * tokens * DIM, "values" if per_token else "keys", ", outliers" if traced else ""
    how = {"unit": unit, "per_token": per_token, "bits": BITS, "held_in": torch.float16}
    return KernelCase(
        "quantise",
        f"B={batch} H={H_KV} T={tokens} D={DIM} {BITS} bits of {unit}, {side}{pool}",
        setup,
        {"pytorch": pytorch, "triton": provider(quantise_triton, attrgetter("scale"), **how)},
        # numbers in; codes, scales and minima out; a byte for every token that may be traced
        bytes_moved=numbers * 2 + numbers * BITS // 8 + 4 * numbers // unit + numbers // DIM * traced,
        tolerance=1e-3,
    )

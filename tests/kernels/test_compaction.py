"""Compaction: what is kept of a layer moves bit for bit, in order, and nothing else is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.compaction import compact_ref, compact_triton, kept_slots_ref, kept_slots_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def drawn(seed: int, most: int = 90) -> dict[str, Any]:
    """A layer's tensors as views of larger ones, a mask of kept slots (some heads may keep none), spare slots."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    batch, heads, slots, dim, wide = number(1, 3), number(1, 4), number(1, most), number(1, 130), number(1, 130)
    dtype = DTYPES[seed % 3]
    keys = torch.randn(batch, slots, heads, dim, generator=random).to(dtype).transpose(1, 2)
    values = torch.randn(batch, heads, slots + 4, wide, generator=random).to(dtype)[:, :, 3 : 3 + slots]
    states = {
        f"state {i}": torch.randn(batch, heads, slots + i, 3, generator=random)[:, :, i:] for i in range(seed % 6)
    }
    share = torch.rand(batch, heads, 1, generator=random).round(decimals=1)
    mask = torch.rand(batch, heads, slots + 1, generator=random)[:, :, 1:] < share
    positions = torch.rand(batch, heads, slots, generator=random).argsort(-1).int()
    buffers = {"keys": keys, "values": values, "positions": positions, **states}
    return {"buffers": buffers, "mask": mask, "most": int(mask.sum(-1).max()), "spare": number(0, 3)}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].shape == x.shape and torch.equal(bits(got[name]), bits(x)) for name, x in expected.items()
    )


def test_the_reference_moves_what_stays_to_the_front() -> None:
    mask = torch.tensor([[[False, True, False, True], [True, False, False, False]]])
    slots, counts = kept_slots_ref(mask, 2)
    assert slots.tolist() == [[[1, 3], [0, 1]]]
    assert counts.tolist() == [[2, 1]]
    keys = torch.arange(8.0).view(1, 2, 4, 1)
    buffers = {"keys": keys, "values": -keys, "positions": torch.tensor([[[0, 2, 4, 6], [1, 3, 5, 7]]])}
    kept = compact_ref(buffers, slots, counts, spare=1)
    assert kept["positions"].tolist() == [[[2, 6, -1], [1, -1, -1]]]
    assert kept["keys"][..., 0].tolist() == [[[1, 3, 0], [4, 5, 0]]]
    assert kept["values"][..., 0].tolist() == [[[-1, -3, 0], [-4, -5, 0]]]


@pytest.mark.parametrize("cases", [1, pytest.param(60, marks=pytest.mark.slow("interprets kernels"))])
def test_the_kernels_move_the_same_bits(cases: int, interpret: Interpreter) -> None:
    """Six numbers of statistics, and other cases in every run; a failure names its seed."""
    for seed in [*torch.randint(0, 2**31, (cases,)).tolist(), *range(6)]:
        case = drawn(seed)
        slots, counts = kept_slots_ref(case["mask"], case["most"])
        found = interpret(kept_slots_triton, mask=case["mask"], most=case["most"])
        assert all(map(torch.equal, found, (slots, counts))), seed
        arguments = {"buffers": case["buffers"], "slots": slots, "counts": counts, "spare": case["spare"]}
        assert equal(interpret(compact_triton, **arguments), compact_ref(**arguments)), seed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("first", range(10))
def test_a_cuda_device_moves_the_same_bits(first: int) -> None:
    for seed in range(first, 60, 10):
        case = drawn(seed, 40_000 if seed % 10 == 0 else 3000)
        mask, buffers = case["mask"].cuda(), {name: x.cuda() for name, x in case["buffers"].items()}
        slots, counts = kept_slots_triton(mask, case["most"])
        assert torch.equal(slots.cpu(), kept_slots_ref(case["mask"], case["most"])[0]), seed
        kept = compact_triton(buffers, slots, counts, case["spare"])
        assert equal(kept, compact_ref(buffers, slots, counts, case["spare"])), seed

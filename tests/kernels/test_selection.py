"""Select and victim without sorting: equal to sorting by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.selection import select_ref, select_triton, victim_ref, victim_triton
from kvbench.policies.select import select, victim


def drawn(seed: int, most: int = 300) -> dict[str, Any]:
    """Arguments of `select` drawn from a seed: many ties, infinities, NaN, empty heads, any counts, odd strides."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def chance(share: float) -> Tensor:
        return torch.rand(batch, heads, slots, generator=random) < share

    batch, heads, slots = number(1, 3), number(1, 4), number(1, most)
    few, empty = number(1, 5), (0.0, 0.3, 1.0)[number(0, 3)]
    scores = torch.randn(batch, heads, slots, generator=random)
    if seed % 3:
        scores = (scores * few).round()  # -0 among them
        scores[chance(0.1)], scores[chance(0.1)] = torch.inf, -torch.inf
    if seed % 11 < 4:
        scores[chance(0.2)] = torch.nan
    base = torch.randint(-few, few, (slots, batch, heads), generator=random).float().permute(1, 2, 0)
    if seed % 13 < 4:
        base[chance(0.2)] = torch.nan
    places = torch.rand(batch, heads, slots, generator=random).argsort(-1).int() + number(0, 5)
    ascending = seed % 5 == 0
    positions = (places.sort(-1).values if ascending else places).masked_fill(chance(empty), -1)
    whole = torch.zeros(batch, heads, slots + 3, dtype=torch.int32)
    whole[:, :, :slots] = positions
    counts = torch.randint(0, slots + 3, (batch, heads), generator=random)
    return {
        "scores": scores[:, :1].expand(-1, heads, -1) if seed % 7 == 0 else scores,
        "tie_break": base if seed % 2 else None,
        "positions": whole[:, :, :slots],
        "protected": chance((0.0, 0.2, 1.0)[number(0, 3)]),
        "keep": counts if seed % 4 else number(0, slots + 3),
        "ascending": ascending,
    }


def reference(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in call.items() if name != "ascending"}


def of_victim(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in call.items() if name not in ("ascending", "keep")}


def seeds(count: int) -> list[int]:
    """Other cases in every run; a failure names its seed."""
    return torch.randint(0, 2**31, (count,)).tolist()


def test_the_reference_sorts_as_by_hand() -> None:
    scores = torch.tensor([[[1.0, 5.0, 1.0, 1.0, 9.0, 0.0]]])
    base = torch.tensor([[[2.0, 0.0, 3.0, 2.0, 9.0, 0.0]]])
    positions = torch.tensor([[[7, 3, 2, 4, -1, 0]]], dtype=torch.int32)
    protected = torch.tensor([[[False, False, False, False, False, True]]])
    # Protected 5, then 1 by score, 2 by base score, then 3 (position 4) before 0 (position 7); 4 is empty.
    kept = [select_ref(scores, base, positions, protected, n)[0, 0].nonzero()[:, 0].tolist() for n in range(7)]
    assert kept == [[], [5], [1, 5], [1, 2, 5], [1, 2, 3, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5]]
    assert victim_ref(scores, base, positions, protected).tolist() == [[[0]]]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**31))
def test_pytorch_gives_what_the_reference_gives(seed: int) -> None:
    call = drawn(seed, most=40)
    torch.testing.assert_close(select(**call), select_ref(**reference(call)), rtol=0, atol=0)
    torch.testing.assert_close(victim(**of_victim(call)), victim_ref(**of_victim(call)), rtol=0, atol=0)


@pytest.mark.parametrize("cases", [4, pytest.param(96, marks=pytest.mark.slow("interprets kernels"))])
def test_the_kernels_give_what_the_reference_gives(cases: int, interpret: Interpreter) -> None:
    for seed in seeds(cases):
        call = drawn(seed, 90)
        assert torch.equal(interpret(select_triton, **call), select_ref(**reference(call))), f"select, seed {seed}"
        assert torch.equal(interpret(victim_triton, **of_victim(call)), victim_ref(**of_victim(call))), f"seed {seed}"


@pytest.mark.slow("interprets kernels")
def test_rows_longer_than_a_block_carry_ties_over(interpret: Interpreter) -> None:
    slots = 8192 + 37
    call = {
        "scores": torch.zeros(1, 1, slots),
        "tie_break": None,
        "positions": torch.arange(slots, dtype=torch.int32)[None, None].flip(-1),
        "protected": torch.zeros(1, 1, slots, dtype=torch.bool),
    }
    kept = interpret(select_triton, **call, keep=8200)
    assert kept[0, 0].nonzero()[:, 0].tolist() == list(range(37 - 8, slots)), "the lower positions stay"
    assert interpret(victim_triton, **call).tolist() == [[[0]]], "the newest token goes"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("first", range(12))
def test_a_cuda_device_gives_what_sorting_gives(first: int) -> None:
    for i, seed in enumerate(seeds(12), start=first):
        call = drawn(seed + i, 140_000 if i == first else 5000)
        there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
        assert torch.equal(select_triton(**there).cpu(), select(**call)), f"select, seed {seed + i}"
        assert torch.equal(victim_triton(**of_victim(there)).cpu(), victim(**of_victim(call))), f"seed {seed + i}"

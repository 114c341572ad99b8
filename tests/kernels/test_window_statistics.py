"""Statistics of an observation window: by hand, the kernel against the rows, and what is never in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels import window_statistics as module
from kvbench.kernels.window_largest import window_largest, window_largest_ref, window_largest_triton
from kvbench.kernels.window_statistics import (
    window_statistics,
    window_statistics_ref,
    window_statistics_triton,
)

FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
VARIANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-9}  # CAKE multiplies it by 200: its own digits count


def draw(seed: int) -> dict[str, Any]:
    """A call of sizes that only the seed knows: odd strides, empty slots, padding, any group."""
    random = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    batch, heads, group, window, slots, dim = some(1, 2), some(1, 2), some(1, 8), some(2, 40), some(1, 150), some(1, 70)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[some(0, 2)]
    seen = max(window, slots) + 9
    places = torch.stack([torch.randperm(seen, generator=random)[:slots] for _ in range(batch * heads)])
    places[torch.rand(places.shape, generator=random) < 0.2] = -1
    asked = torch.arange(seen - window, seen).repeat(batch, 1)
    asked[-1, : some(0, window - 1)] = -1
    store = torch.randn(batch, slots + 3, heads, dim + 2, generator=random)
    return {
        "queries": (2 * torch.randn(batch, window, heads * group, dim, generator=random)).to(dtype).transpose(1, 2),
        "keys": store.to(dtype)[:, 1:-2, :, 2:].transpose(1, 2),
        "query_positions": asked,
        "key_positions": places.view(batch, heads, slots),
        "scaling": dim**-0.5,
        "softcap": 4.0 if some(0, 3) == 0 else None,
        "sliding_window": some(3, seen) if some(0, 2) == 0 else None,
        "sinks": torch.randn(some(1, batch), heads * group, generator=random) if some(0, 1) == 0 else None,
    }


def test_two_queries_by_hand() -> None:
    """Rows 1, 0 and 1/4, 3/4: sums 5/4 and 3/4, unbiased variances 9/32, entropies of each column."""
    got = window_statistics(
        queries=torch.tensor([[[[1.0], [1.0]]]]),
        keys=torch.tensor([[[[0.0], [math.log(3.0)]]]]),
        query_positions=torch.tensor([[7, 8]]),
        key_positions=torch.tensor([[[7, 8]]]),
        scaling=1.0,
    )
    torch.testing.assert_close(got.sums[0, 0, 0], torch.tensor([5 / 4, 3 / 4]))
    torch.testing.assert_close(got.variances[0, 0, 0], torch.tensor([9 / 32, 9 / 32]))
    expected = torch.tensor([math.log(4.0) / 4, 3 / 4 * math.log(4 / 3)])
    torch.testing.assert_close(got.entropies[0, 0, 0], expected)


@pytest.mark.parametrize(
    "seed", [0, 1, 3, 5, *(pytest.param(seed, marks=pytest.mark.slow("interprets kernels")) for seed in (2, 4, 6, 7))]
)
def test_the_kernel_equals_the_rows(seed: int, interpret: Interpreter) -> None:
    call = draw(seed)
    got, expected = interpret(window_statistics_triton, **call), window_statistics_ref(**call)
    torch.testing.assert_close(got.sums, expected.sums, **FLOAT32)
    torch.testing.assert_close(got.variances, expected.variances, **VARIANCE)
    torch.testing.assert_close(got.entropies, expected.entropies, **FLOAT32)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow("interprets kernels"))])
def test_the_largest_head_is_that_of_the_rows(seed: int, interpret: Interpreter) -> None:
    got = interpret(window_largest_triton, **draw(seed))
    torch.testing.assert_close(got, window_largest_ref(**draw(seed)), **FLOAT32)


def test_the_largest_of_two_heads_by_hand() -> None:
    """One query; head 0 gives 1/4, 3/4 and head 1 1/2, 1/2: the larger of each slot is 1/2, 3/4."""
    keys = torch.tensor([[[[0.0], [math.log(3.0)]], [[0.0], [0.0]]]])
    got = window_largest(torch.ones(1, 2, 1, 1), keys, torch.tensor([[1]]), torch.tensor([[[0, 1], [0, 1]]]), 1.0)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.75]]))


def test_a_sink_takes_its_share_of_every_row() -> None:
    """Odds of 1 against a sink's 3 in head 0, and against a sink's 1 in head 1: 1/4 and 1/2 of each of two queries."""
    call = torch.ones(1, 2, 2, 1), torch.zeros(1, 2, 1, 1), torch.tensor([[4, 5]]), torch.tensor([[[3], [3]]]), 1.0
    sinks = torch.tensor([[math.log(3.0), 0.0]])
    torch.testing.assert_close(window_statistics(*call, sinks=sinks).sums.flatten(), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(window_largest(*call, sinks=sinks), torch.tensor([[1.0]]))


def test_sums_alone_are_the_same_sums(interpret: Interpreter) -> None:
    got = interpret(window_statistics_triton, **draw(0), spread=False)
    torch.testing.assert_close(got.sums, window_statistics_ref(**draw(0)).sums, **FLOAT32)
    assert got.variances.numel() == got.entropies.numel() == 0


def test_a_slots_blocks_are_dealt_out_without_remainder_or_overlap() -> None:
    for slots in (1, 64, 65, 1000, 32768, 1_000_000):
        for beside in (1, 8, 32, 1000):
            each, splits = module._split(slots, 64, beside)
            assert (splits - 1) * each * 64 < slots <= splits * each * 64


def test_a_window_that_does_not_fit_registers_is_refused() -> None:
    pytest.importorskip("triton")
    wide = {"queries": torch.zeros(1, 1, 129, 8), "query_positions": torch.zeros(1, 129, dtype=torch.long)}
    keys = {"keys": torch.zeros(1, 1, 4, 8), "key_positions": torch.zeros(1, 1, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="at most 128 queries, got 129"):
        window_statistics_triton(**wide, **keys, scaling=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_cuda_device_gives_what_the_reference_gives(seed: int) -> None:
    call = draw(seed)
    there = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in call.items()}
    got, expected = window_statistics(**there), window_statistics_ref(**call)
    torch.testing.assert_close(got.sums.cpu(), expected.sums, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.variances.cpu(), expected.variances, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(got.entropies.cpu(), expected.entropies, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("seed", range(200, 240))
def test_a_cuda_device_finds_the_largest_head_that_the_reference_finds(seed: int) -> None:
    call = draw(seed)
    there = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in call.items()}
    torch.testing.assert_close(window_largest(**there).cpu(), window_largest_ref(**call), rtol=1e-4, atol=1e-4)

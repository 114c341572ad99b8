"""Statistics over queries and windows: by hand, and the kernels, interpreted, against all rows in memory."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from column_cases import CASES, Case
from kernel_interpreted import Interpreter, mostly_slow
from torch import Tensor

from kvbench.kernels.query_sums import attention_moments, column_sums, entropy, variance, window_statistics
from kvbench.kernels.references import Attended, attention_rows

FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # a wrong term moves sums by 1e-2
VARIANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-9}  # CAKE multiplies it by 200: its own digits count
FAST = ("everything-float16", "one-slot-one-query-float32")


def rows_of(call: dict[str, Any]) -> Tensor:
    """All rows, the expected results' source: `attention_rows` is proved slot by slot in its own test."""
    return attention_rows(**{name: x for name, x in call.items() if name not in ("log_sum_exp", "aligned")})


def sums_by_kernels(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Column sums and both moments."""
    return (column_sums(**call), *attention_moments(**call))


def agree(call: dict[str, Any], interpret: Interpreter, asked: dict[str, Any] | None = None) -> None:
    rows = rows_of(call)
    mean = rows.mean(2)
    got = interpret(sums_by_kernels, call=asked or call)
    for found, expected in zip(got, (rows.sum(-2), mean.sum(-2), mean.square().sum(-2)), strict=True):
        torch.testing.assert_close(found, expected, **FLOAT32)


def test_column_sums_of_two_queries_by_hand() -> None:
    call = {
        "queries": torch.ones(1, 1, 2, 1),
        "keys": torch.tensor([[[[5.0], [5.0 + math.log(2.0)]]]]),
        "query_positions": torch.tensor([[3, 4]]),
        "key_positions": torch.tensor([[[3, 4]]]),
        "scaling": 1.0,
    }
    # the first query sees the first slot alone: 1, 0; the second both, at odds of 1 to 2: 1/3, 2/3
    expected = torch.tensor([[[[4 / 3, 2 / 3]]]])
    torch.testing.assert_close(column_sums(**call), expected)
    attended = Attended(torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2, 1))
    torch.testing.assert_close(column_sums(**call, attended=attended), expected)


@pytest.mark.parametrize("name", mostly_slow(CASES, FAST))
def test_the_kernels_give_the_sums_of_all_rows(name: str, interpret: Interpreter) -> None:
    agree(CASES[name].draw(list(CASES).index(name)), interpret)


def window(seed: int) -> dict[str, Any]:
    """A call of sizes that only the seed knows: odd strides, empty slots, padding, any group."""
    random = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    batch, heads, group, new, slots, dim = some(1, 2), some(1, 2), some(1, 8), some(2, 40), some(1, 150), some(1, 70)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[some(0, 2)]
    seen = max(new, slots) + 9
    places = torch.stack([torch.randperm(seen, generator=random)[:slots] for _ in range(batch * heads)])
    places[torch.rand(places.shape, generator=random) < 0.2] = -1
    asked = torch.arange(seen - new, seen).repeat(batch, 1)
    asked[-1, : some(0, new - 1)] = -1
    store = torch.randn(batch, slots + 3, heads, dim + 2, generator=random)
    return {
        "queries": (2 * torch.randn(batch, new, heads * group, dim, generator=random)).to(dtype).transpose(1, 2),
        "keys": store.to(dtype)[:, 1:-2, :, 2:].transpose(1, 2),
        "query_positions": asked,
        "key_positions": places.view(batch, heads, slots),
        "scaling": dim**-0.5,
        "softcap": 4.0 if some(0, 3) == 0 else None,
        "sliding_window": some(3, seen) if some(0, 2) == 0 else None,
        "sinks": torch.randn(some(1, batch), heads * group, generator=random) if some(0, 1) == 0 else None,
    }


def test_a_window_of_two_queries_by_hand() -> None:
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
    "seed", [0, 1, 3, *(pytest.param(seed, marks=pytest.mark.slow("interprets kernels")) for seed in (2, 4, 5, 6, 7))]
)
def test_the_window_kernel_gives_the_statistics_of_the_rows(seed: int, interpret: Interpreter) -> None:
    call = window(seed)
    rows = rows_of(call)
    got = interpret(window_statistics, **call)
    torch.testing.assert_close(got.sums, rows.sum(-2), **FLOAT32)
    torch.testing.assert_close(got.variances, variance(rows), **VARIANCE)
    torch.testing.assert_close(got.entropies, entropy(rows), **FLOAT32)


@pytest.mark.slow("starts a process that imports torch")
def test_the_module_can_be_imported_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kvbench.kernels.query_sums import column_sums\n"
        "x = torch.zeros(1, 1, 9, 4); at = torch.arange(9)[None]\n"
        "print(column_sums(x, x, at, at[None], 1.0)[0, 0, 0, -1].item() * 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1.0)  # the last slot gets 1/9 of the last query


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cuda_equals_the_reference_in_bfloat16(dim: int) -> None:
    call = Case(batch=2, heads=2, group=4, new=700, slots=900, dim=dim, dtype=torch.bfloat16, empty=20).draw(dim)
    there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    rows = rows_of(call)
    torch.testing.assert_close(column_sums(**there).cpu(), rows.sum(-2), rtol=1e-3, atol=1e-3)
    mean = rows.mean(2)
    moments = attention_moments(**there)
    torch.testing.assert_close(moments.sums.cpu(), mean.sum(-2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(moments.squares.cpu(), mean.square().sum(-2), rtol=1e-3, atol=1e-3)
    newest = {**there, **{name: there[name][..., -32:, :] for name in ("queries",)}}
    newest["query_positions"] = there["query_positions"][:, -32:]
    found = window_statistics(**newest)
    torch.testing.assert_close(found.sums.cpu(), rows[..., -32:, :].sum(-2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.variances.cpu(), variance(rows[..., -32:, :]), rtol=1e-2, atol=1e-7)

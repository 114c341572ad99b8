"""Statistics over queries and windows: by hand, and the kernels, interpreted, against all rows in memory."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from column_cases import CASES, Case
from kernel_interpreted import Interpreter, largest, mostly_slow
from torch import Tensor

from kvbench.kernels import query_sums
from kvbench.kernels.prompt import prompt_attention_ref
from kvbench.kernels.query_sums import (
    attention_moments,
    column_sums,
    entropy,
    variance,
    window_largest,
    window_statistics,
)
from kvbench.kernels.references import Attended, attention_rows

FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # a wrong term moves sums by 1e-2
VARIANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-9}  # CAKE multiplies it by 200: its own digits count
FAST = ("grouped-float32", "everything-float16", "one-slot-one-query-float32")


def rows_of(call: dict[str, Any]) -> Tensor:
    """All rows, the expected results' source: `attention_rows` is proved slot by slot in its own test."""
    return attention_rows(**{name: x for name, x in call.items() if name not in ("log_sum_exp", "aligned")})


def with_sinks(call: dict[str, Any], rows: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(rows)
    return {**call, "sinks": torch.randn(rows, call["queries"].shape[1], generator=random)}


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


def test_moments_by_hand() -> None:
    # One KV head, two query heads, two queries: rows of head 0 are (1, 0), (1/2, 1/2), of head 1 (1, 0), (1/4, 3/4).
    queries = torch.tensor([[[[0.0], [0.0]], [[0.0], [math.log(3.0)]]]])
    keys, positions = torch.tensor([[[[0.0], [1.0]]]]), torch.arange(2)[None]
    for attended in (None, Attended(torch.ones(1, 1, 2, 1), torch.zeros(1, 2, 2, 1))):
        got = attention_moments(queries, keys, positions, positions[:, None], 1.0, attended=attended)
        torch.testing.assert_close(got.sums, torch.tensor([[[1 + 3 / 8, 5 / 8]]]))
        torch.testing.assert_close(got.squares, torch.tensor([[[1 + 9 / 64, 25 / 64]]]))


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_rows_give_the_sums_of_all_rows(name: str) -> None:
    call = CASES[name].draw(3)
    rows = rows_of(call)
    values = torch.ones(*call["keys"].shape[:3], 1)  # type: ignore[attr-defined]
    for _ in range(2):  # the buffer of the first call is used again
        attended = Attended(values, torch.zeros(*call["queries"].shape[:3], 1))  # type: ignore[attr-defined]
        torch.testing.assert_close(column_sums(**call, attended=attended), rows.sum(-2), **FLOAT32)  # type: ignore[arg-type]
        moments = attention_moments(**call, attended=attended)  # type: ignore[arg-type]
        torch.testing.assert_close(moments.squares, rows.mean(2).square().sum(-2), **FLOAT32)


@pytest.mark.parametrize("name", mostly_slow(CASES, FAST))
def test_the_kernels_give_the_sums_of_all_rows(name: str, interpret: Interpreter) -> None:
    agree(CASES[name].draw(list(CASES).index(name)), interpret)


def test_sinks_of_every_sequence_take_their_share(interpret: Interpreter) -> None:
    agree(with_sinks(Case(batch=2, new=12, slots=19, dim=8).draw(1), 2), interpret)


def test_a_given_log_sum_exp_and_slots_in_order_give_the_same(interpret: Interpreter) -> None:
    call = Case(heads=1, group=3, new=70, slots=70, dim=8, prompt=True).draw(2)
    lse = prompt_attention_ref(values=call["keys"], **call).log_sum_exp  # type: ignore[arg-type]
    nowhere = {at: torch.full_like(call[at], -1) for at in ("query_positions", "key_positions")}  # type: ignore[call-overload]
    agree(call, interpret, {**call, **nowhere, "log_sum_exp": lse, "aligned": True})


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


def test_sums_of_a_window_alone_and_from_a_given_log_sum_exp_are_the_same(interpret: Interpreter) -> None:
    call = {name: x for name, x in window(0).items() if name != "sinks"}
    lse = prompt_attention_ref(values=call["keys"], **call).log_sum_exp
    got = interpret(window_statistics, **call, log_sum_exp=lse, spread=False)
    torch.testing.assert_close(got.sums, rows_of(call).sum(-2), **FLOAT32)
    assert got.variances.numel() == got.entropies.numel() == 0


def test_a_window_that_does_not_fit_registers_is_refused(interpret: Interpreter) -> None:
    wide = {"queries": torch.zeros(1, 1, 129, 8), "query_positions": torch.zeros(1, 129, dtype=torch.long)}
    keys = {"keys": torch.zeros(1, 1, 4, 8), "key_positions": torch.zeros(1, 1, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="at most 128 queries, got 129"):
        interpret(window_statistics, **wide, **keys, scaling=1.0)


def test_no_rows_of_a_window_are_in_memory(interpret: Interpreter) -> None:
    call = Case(heads=1, group=2, new=32, slots=800, dim=8).draw(0)
    assert interpret(largest, function=window_statistics, arguments=call) < 2 * 32 * 800 * 4 / 4


def test_the_largest_of_two_heads_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal queries; head 0 gives 1/4, 3/4 and head 1 1/2, 1/2: the larger of each slot is 1/2, 3/4, twice."""
    keys = torch.tensor([[[[0.0], [math.log(3.0)]], [[0.0], [0.0]]]])
    for at_once in (2**26, 1):
        monkeypatch.setattr(query_sums, "ROWS_AT_ONCE", at_once)
        got = window_largest(torch.ones(1, 2, 2, 1), keys, torch.tensor([[1, 1]]), torch.tensor([[[0, 1]] * 2]), 1.0)
        torch.testing.assert_close(got, torch.tensor([[1.0, 1.5]]))


def test_a_sink_takes_its_share_of_every_row() -> None:
    """Odds of 1 against a sink's 3 in head 0, and against a sink's 1 in head 1: 1/4 and 1/2 of each of two queries."""
    call = torch.ones(1, 2, 2, 1), torch.zeros(1, 2, 1, 1), torch.tensor([[4, 5]]), torch.tensor([[[3], [3]]]), 1.0
    sinks = torch.tensor([[math.log(3.0), 0.0]])
    torch.testing.assert_close(window_statistics(*call, sinks=sinks).sums.flatten(), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(window_largest(*call, sinks=sinks), torch.tensor([[1.0]]))


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
def test_a_cuda_device_gives_in_bfloat16_what_the_reference_gives(dim: int) -> None:
    call = Case(batch=2, heads=2, group=4, new=700, slots=900, dim=dim, dtype=torch.bfloat16, empty=20).draw(dim)
    there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    rows = rows_of(call)
    torch.testing.assert_close(column_sums(**there).cpu(), rows.sum(-2), rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]
    mean = rows.mean(2)
    moments = attention_moments(**there)  # type: ignore[arg-type]
    torch.testing.assert_close(moments.sums.cpu(), mean.sum(-2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(moments.squares.cpu(), mean.square().sum(-2), rtol=1e-3, atol=1e-3)
    newest = {**there, **{name: there[name][..., -32:, :] for name in ("queries",)}}  # type: ignore[index]
    newest["query_positions"] = there["query_positions"][:, -32:]  # type: ignore[index]
    found = window_statistics(**newest)  # type: ignore[arg-type]
    torch.testing.assert_close(found.sums.cpu(), rows[..., -32:, :].sum(-2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.variances.cpu(), variance(rows[..., -32:, :]), rtol=1e-2, atol=1e-7)

"""Decode attention: the reference by hand and by loops, and the kernels against it, interpreted on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_cases import DECODE_CASES, DecodeCase, decoded
from kernel_interpreted import Interpreter, mostly_slow

from kvbench.kernels.decode import decode_attention, decode_attention_flat
from kvbench.kernels.references import Attention
from kvbench.kernels.tiles import fit_heads

FAST = (
    "packed-and-all-that-is-asked",
    "more-programs-than-tiles",
    "odd-group-odd-heads",
    "sinks-bfloat16",
    "sinks-and-nothing-else-to-see",
    "a-sequence-without-a-token",
    "no-slots",
    "one-slot",
    "everything",
    "a-bias",
    "a-bias-packed-softcap-float16",
    "flat-and-all-that-is-asked",
)
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {  # of outputs; all statistics are float32
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},  # weights are rounded to the values' type before their product
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}


def by_hand(**how: Any) -> Attention:
    """One query at position 4 over slots of odds 1, 2 and 5, the last of which is later than the query."""
    return decode_attention(
        queries=torch.ones(1, 1, 1, 1),
        keys=torch.tensor([[[[0.0], [math.log(2.0)], [math.log(5.0)]]]]),
        values=torch.tensor([[[[3.0, 0.0], [0.0, 6.0], [100.0, 100.0]]]]),
        query_positions=torch.tensor([[4]]),
        key_positions=torch.tensor([[[2, 4, 5]]]),
        scaling=1.0,
        **how,
    )


def test_three_slots_by_hand() -> None:
    sums = torch.full((1, 1, 3, 1), 10.0)
    got = by_hand(weights=True, sums=sums)
    torch.testing.assert_close(got.out, torch.tensor([[[[1.0, 4.0]]]]))  # 1/3 of (3, 0) and 2/3 of (0, 6)
    torch.testing.assert_close(got.log_sum_exp, torch.tensor([[[math.log(3.0)]]]))
    torch.testing.assert_close(got.weights, torch.tensor([[[[[1 / 3, 2 / 3, 0.0]]]]]))
    torch.testing.assert_close(sums.flatten(), torch.tensor([10 + 1 / 3, 10 + 2 / 3, 10.0]))


def test_a_sink_takes_its_share_and_adds_nothing() -> None:
    got = by_hand(sinks=torch.tensor([math.log(3.0)]), weights=True)
    torch.testing.assert_close(got.out, torch.tensor([[[[0.5, 2.0]]]]))  # odds of 1 to 2 to the sink's 3
    torch.testing.assert_close(got.log_sum_exp, torch.tensor([[[math.log(6.0)]]]))
    torch.testing.assert_close(got.weights, torch.tensor([[[[[1 / 6, 2 / 6, 0.0]]]]]))


def test_a_bias_multiplies_the_odds_of_its_slot() -> None:
    bias = torch.tensor([[[math.log(4.0), 0.0, 7.0]]])  # odds of 4 to 2; the later slot stays unseen
    got = by_hand(bias=bias, weights=True)
    torch.testing.assert_close(got.out, torch.tensor([[[[2.0, 2.0]]]]))
    torch.testing.assert_close(got.log_sum_exp, torch.tensor([[[math.log(6.0)]]]))
    torch.testing.assert_close(got.weights, torch.tensor([[[[[4 / 6, 2 / 6, 0.0]]]]]))


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_segments_of_any_lengths_are_joined_of_any_number_of_programs(programs: int, interpret: Interpreter) -> None:
    case = DecodeCase(
        flat=True, batch=2, heads=2, slots=40, dim=8, value_dim=8, weights=True, sums=1, sinks=True, programs=programs
    )
    agree(case.draw(programs), case.dtype, interpret)


def test_sequences_of_unlike_budgets_decode_in_one_call(interpret: Interpreter) -> None:
    """Sequence 0 below its budget of 40, sequence 1 at 9, of which head 1 holds 3: each gives what it gives alone."""
    torch.manual_seed(0)
    starts, counts = torch.tensor([[0, 64], [128, 160]]), torch.tensor([[17, 17], [9, 3]])
    keys, values = torch.randn(192, 8), torch.randn(192, 8)
    positions = torch.arange(192) % 32
    queries, asked = torch.randn(2, 4, 1, 8), torch.tensor([[40], [35]])
    call = {"key_positions": positions, "keys": keys, "values": values, "most": 40, "scaling": 0.3}
    together = interpret(
        decode_attention_flat, queries=queries, query_positions=asked, starts=starts, counts=counts, **call
    )
    for row, own in enumerate((slice(0, 1), slice(1, 2))):
        for head in range(2):
            held = slice(int(starts[row, head]), int(starts[row, head] + counts[row, head]))
            rows = queries[own, 2 * head : 2 * head + 2, 0] @ keys[held].T * 0.3
            expected = rows.softmax(-1) @ values[held]
            torch.testing.assert_close(together.out[own, 2 * head : 2 * head + 2, 0], expected)


def agree(call: dict[str, Any], out: torch.dtype, interpret: Interpreter) -> Attention:
    """The kernels' results, `sums` among them, are those of the reference."""
    got, expected = interpret(decoded, call=call), decoded(call)  # without a GPU, here the reference
    assert {name for name, x in got.items() if x is not None} == {name for name, x in expected.items() if x is not None}
    for name, x in expected.items():
        if x is not None:
            torch.testing.assert_close(got[name], x, **TOLERANCES[out if name == "out" else torch.float32])
    return Attention(got["out"], got["log_sum_exp"], got["weights"])


@pytest.mark.parametrize("name", mostly_slow(DECODE_CASES, FAST))
def test_the_kernels_equal_the_reference(name: str, interpret: Interpreter) -> None:
    case = DECODE_CASES[name]
    agree(case.draw(list(DECODE_CASES).index(name)), case.dtype, interpret)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cuda_equals_the_reference_in_bfloat16(dim: int, flat: bool) -> None:
    case = DecodeCase(
        batch=3, heads=4, group=4, slots=3000, dim=dim, value_dim=dim, dtype=torch.bfloat16, weights=True, sums=1,
        sinks=True, empty=0 if flat else 100, flat=flat, appends=flat,
    )  # fmt: skip
    got, expected = decoded(case.draw(dim, "cuda")), decoded(case.draw(dim))
    for name in ("out", "log_sum_exp", "weights", "sums"):
        torch.testing.assert_close(got[name].cpu(), expected[name], **TOLERANCES[torch.bfloat16])


def test_heads_beyond_the_tiles_are_refused() -> None:
    fit_heads("decode", 256, 256)
    with pytest.raises(ValueError, match="decode takes a head_dim of at most 256, got 257; use device=cpu"):
        fit_heads("decode", 64, 257)

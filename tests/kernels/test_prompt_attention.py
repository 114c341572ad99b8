"""Attention with its log-sum-exp: by hand, the kernel against the reference, PyTorch's kernels against ours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter, mostly_slow
from torch.nn import functional as F

from kvbench.kernels import prompt_attention as module
from kvbench.kernels.prompt_attention import (
    Attention,
    prompt_attention,
    prompt_attention_ref,
    prompt_attention_triton,
)

CHOSEN = (
    "grouped-float32",
    "one-kv-head-bfloat16",
    "softcap-float16",
    "sliding-window-shuffled-float16",
    "empty-slots-and-padding-float32",
    "everything-float16",
    "one-slot-one-query-float32",
)
FAST = ("one-kv-head-bfloat16", "everything-float16", "one-slot-one-query-float32", "sinks-padding")
ORDERED = ("grouped-float32", "softcap-float16", "sliding-window-float32", "one-query-head-per-kv-head-float16")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the output, in the dtype of values


def with_values(call: dict[str, Any], sinks: bool, extra: int = 5) -> dict[str, Any]:
    """The call with values of `extra` numbers more than the keys have, NaN in empty slots, and sinks."""
    random = torch.Generator().manual_seed(3)
    keys = call["keys"]
    values = torch.randn(*keys.shape[:3], keys.shape[3] + extra, generator=random).to(keys.dtype)
    logits = torch.randn(call["queries"].shape[1], generator=random) if sinks else None
    return {**call, "values": values, "sinks": logits}


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """The call with what nobody may read set to NaN."""
    keys, values = call["keys"].clone(), call["values"].clone()
    keys[call["key_positions"] < 0] = torch.nan
    values[call["key_positions"] < 0] = torch.nan
    return {**call, "keys": keys, "values": values}


def in_order(call: dict[str, Any]) -> dict[str, Any]:
    """The call with slots at positions 0.. and the queries at the last of them."""
    batch, heads, slots = call["key_positions"].shape
    new = call["queries"].shape[2]
    positions = torch.arange(slots - new, slots).repeat(batch, 1), torch.arange(slots).repeat(batch, heads, 1)
    return {**call, "query_positions": positions[0], "key_positions": positions[1]}


@pytest.fixture(scope="module")
def calls(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every chosen case without and with sinks, and some in order."""
    drawn = {name: with_values(cases[name], sinks=False) for name in CHOSEN}
    drawn["sinks"] = with_values(cases["everything-float16"], sinks=True)
    drawn["sinks-padding"] = with_values(cases["empty-slots-and-padding-float32"], sinks=True)
    return drawn


@pytest.fixture(scope="module")
def ordered(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: in_order(with_values(cases[name], sinks=False)) for name in ORDERED}


def test_two_queries_and_a_sink_by_hand() -> None:
    """Odds of 1 and 2 for the slots, 1 for the sink: 1/4, 2/4, 1/4; the first query sees its own slot alone: 1/2."""
    got = prompt_attention(
        queries=torch.tensor([[[[1.0], [1.0]]]]),
        keys=torch.tensor([[[[0.0], [math.log(2.0)]]]]),
        values=torch.tensor([[[[4.0], [8.0]]]]),
        query_positions=torch.tensor([[3, 4]]),
        key_positions=torch.tensor([[[3, 4]]]),
        scaling=1.0,
        sinks=torch.tensor([0.0]),
    )
    torch.testing.assert_close(got.out, torch.tensor([[[[2.0], [5.0]]]]))
    torch.testing.assert_close(got.log_sum_exp, torch.tensor([[[math.log(2.0), math.log(4.0)]]]))


def test_a_few_queries_at_a_time_give_the_same(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    for call in calls.values():
        got, expected = prompt_attention(**call), prompt_attention_ref(**call)
        torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp)
        torch.testing.assert_close(got.out, expected.out)


def assert_close(got: Attention, expected: Attention) -> None:
    tolerance = TOLERANCE[expected.out.dtype]
    torch.testing.assert_close(got.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", mostly_slow([*CHOSEN, "sinks", "sinks-padding"], FAST))
def test_the_kernel_equals_the_reference(case: str, calls: Any, interpret: Interpreter) -> None:
    got = interpret(prompt_attention_triton, **poisoned(calls[case]))
    assert_close(got, prompt_attention_ref(**calls[case]))


@pytest.mark.parametrize("case", mostly_slow(ORDERED, ["softcap-float16", "sliding-window-float32"]))
def test_without_a_look_at_positions_slots_in_order_give_the_same(
    case: str, ordered: Any, interpret: Interpreter
) -> None:
    call = ordered[case]
    nowhere = {at: torch.full_like(call[at], -1) for at in ("query_positions", "key_positions")}
    got = interpret(prompt_attention_triton, **{**call, **nowhere}, aligned=True)
    assert_close(got, prompt_attention_ref(**call))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_plain_prompt_is_attended_to_as_pytorch_does_it_and_its_sums_are_those_of_the_kernel(
    dtype: torch.dtype, dim: int
) -> None:
    random = torch.Generator("cuda").manual_seed(dim)
    queries = torch.randn(2, 777, 8, dim, generator=random, device="cuda", dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, 2, 2, 777, dim, generator=random, device="cuda", dtype=dtype).unbind(0)
    at = torch.arange(777, device="cuda").repeat(2, 1)
    call = queries, keys, values, at, at[:, None].expand(-1, 2, -1), dim**-0.5
    got = prompt_attention(*call, aligned=True)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=dim**-0.5, enable_gqa=True)
    assert torch.equal(got.out, expected)
    for aligned in (True, False):
        ours = prompt_attention_triton(*call, aligned=aligned)
        torch.testing.assert_close(got.log_sum_exp, ours.log_sum_exp, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.out, ours.out, rtol=2e-2, atol=2e-2)


def test_the_reference_is_the_attention_of_pytorch() -> None:
    random = torch.Generator().manual_seed(1)
    queries = torch.randn(2, 4, 33, 16, generator=random)
    keys, values = torch.randn(2, 2, 33, 16, generator=random), torch.randn(2, 2, 33, 16, generator=random)
    at = torch.arange(33).repeat(2, 1)
    got = prompt_attention_ref(queries, keys, values, at, at[:, None].expand(-1, 2, -1), 0.25)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(got.out, expected)

"""Attention on packed codes: the reference by hand, the kernels interpreted, compiled, and run where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter, mostly_slow
from kv_quantised import ATTENTION, quantised_attention_ref
from kv_stores import attended, feed, stream

from kvbench.kernels.quantized import quantised_attention
from kvbench.policies.stores.kivi import Kivi

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

FAST = (
    "outliers-and-softcap-4-bits",
    "8-bits-odd-head",
    "groups-that-end-inside-a-word",
    "a-sequence-that-asks-nothing",
    "bfloat16",
)
FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # a code that is off by one moves the output by 1e-3 and more


def wide(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with queries in float32, so that the output is not rounded."""
    return {**call, "queries": call["queries"].float()}


def test_the_reference_equals_attention_of_a_store_of_codes() -> None:
    held = feed(Kivi(group=32, residual=32), *stream(150, dim=64))
    queries = torch.randn(1, 6, 1, 64)
    keys, values = (held.side(side) for side in range(2))
    assert keys is not None
    assert values is not None
    got = quantised_attention_ref(queries, torch.tensor([[149]]), keys, values, 64**-0.5)
    torch.testing.assert_close(got.out, attended(held, queries, 149), **FLOAT32)


@pytest.mark.parametrize("name", mostly_slow(ATTENTION, FAST))
def test_the_kernels_equal_the_reference(name: str, interpret: Interpreter) -> None:
    call = wide(ATTENTION[name].draw(list(ATTENTION).index(name)))
    torch.testing.assert_close(interpret(quantised_attention, **call), quantised_attention_ref(**call), **FLOAT32)


@pytest.mark.parametrize("name", mostly_slow(ATTENTION, FAST[:2]))
def test_queries_of_16_bits_are_multiplied_in_float16(name: str, interpret: Interpreter) -> None:
    """Products of numbers of 11 bits: what a model in float16 computes from dequantised keys and values."""
    call = ATTENTION[name].draw(list(ATTENTION).index(name))
    call["queries"] = call["queries"].half()
    got, expected = interpret(quantised_attention, **call), quantised_attention_ref(**wide(call))
    torch.testing.assert_close(got.out.float(), expected.out, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=4e-3, atol=4e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ATTENTION)
def test_cuda_equals_the_reference(name: str) -> None:
    for seed in range(3):
        case = ATTENTION[name]
        got = quantised_attention(**wide(case.draw(seed, "cuda")))
        expected = quantised_attention_ref(**wide(case.draw(seed)))
        torch.testing.assert_close(got.out.cpu(), expected.out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.log_sum_exp.cpu(), expected.log_sum_exp, rtol=1e-4, atol=1e-4)

"""Attention on packed codes: the reference by hand, the kernels interpreted, compiled, and run where there is a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter, largest, mostly_slow
from kv_quantised import ATTENTION, Case, quantised_attention_ref
from kv_stores import attended, feed, stream

from kvbench.kernels.quantized import (
    Outliers,
    Packed,
    Side,
    quantised_attention,
)
from kvbench.policies.stores.kivi import Kivi
from kvbench.policies.stores.quantised import side

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

FAST = (
    "no-value-in-codes",
    "outliers-and-softcap-4-bits",
    "8-bits-odd-head",
    "groups-that-end-inside-a-word",
    "ragged-heads",
    "a-sequence-that-asks-nothing",
    "bfloat16",
)
FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # a code that is off by one moves the output by 1e-3 and more


def wide(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with queries in float32, so that the output is not rounded."""
    return {**call, "queries": call["queries"].float()}


def by_hand(outliers: Outliers | None) -> dict[str, Any]:
    """Keys 0 and log 2 in codes 0 and 3, log 1 in the tail; values 1, 2 and 5."""
    ones = torch.ones(1, 1, 2, 1)
    keys = Packed(torch.tensor([[[[[12]]]]], dtype=torch.int32), ones[:, :, :1] * math.log(2) / 3, 0 * ones[:, :, :1],
                  2, 2, False)  # fmt: skip
    words = torch.zeros(1, 1, 2, 1, 1, dtype=torch.int32)
    values = Packed(words, ones, torch.tensor([[[[1.0], [2.0]]]]), 2, 1, True)
    return {
        "queries": torch.ones(1, 1, 1, 1),
        "query_positions": torch.tensor([[2]]),
        "keys": Side(keys, torch.zeros(1, 1, 1, 1)),
        "values": Side(values, torch.full((1, 1, 1, 1), 5.0)),
        "scaling": 1.0,
        "outliers": outliers,
    }


def test_the_reference_by_hand() -> None:
    out, log_sum_exp, _ = quantised_attention_ref(**by_hand(None))
    assert out.item() == pytest.approx((1 * 1 + 2 * 2 + 1 * 5) / 4)
    assert log_sum_exp.item() == pytest.approx(math.log(4))
    exact = Outliers(torch.tensor([[[[math.log(3)]]]]), torch.tensor([[[[7.0]]]]), torch.tensor([[[1]]]).int())
    out, log_sum_exp, _ = quantised_attention_ref(
        **by_hand(exact)
    )  # the token at slot 1 counts once, with its exact key
    assert out.item() == pytest.approx((1 * 1 + 3 * 7 + 1 * 5) / 5)
    assert log_sum_exp.item() == pytest.approx(math.log(5))


def test_the_reference_gives_what_a_store_gives_from_its_codes() -> None:
    held = feed(Kivi(group=32, residual=32), *stream(150, dim=64))
    queries = torch.randn(1, 6, 1, 64)
    keys, values = (side(column) for column in held._columns)
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
def test_a_cuda_device_gives_what_the_reference_gives(name: str) -> None:
    for seed in range(3):
        case = ATTENTION[name]
        got = quantised_attention(**wide(case.draw(seed, "cuda")))
        expected = quantised_attention_ref(**wide(case.draw(seed)))
        torch.testing.assert_close(got.out.cpu(), expected.out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.log_sum_exp.cpu(), expected.log_sum_exp, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_many_tokens_on_a_cuda_device(bits: int, group: int) -> None:
    case = Case(batch=2, heads=8, dim=128, value_dim=128, value_unit=group, keys=32768, values=32768, tokens=32800,
                bits=bits, unit=group, outliers=35, dtype=torch.bfloat16)  # fmt: skip
    call = case.draw(0, "cuda")
    expected = quantised_attention_ref(**wide(call))
    got = quantised_attention(**call)
    torch.testing.assert_close(got.out.float(), expected.out, rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=4e-3, atol=4e-3)


def test_nothing_as_large_as_the_dequantised_tensors_is_made(interpret: Interpreter) -> None:
    case = Case(keys=512, values=512, tokens=520, outliers=3)
    assert 0 < interpret(largest, function=quantised_attention, arguments=case.draw(0)) < 512 * 64 * 2

"""CAOTE's errors: the worked example of its specification, and kernels equal to the definition, near X too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.value_errors import value_errors_ref, value_errors_triton
from kvbench.policies.values.caote import Caote
from kvbench.policies.values.fastcaote import FastCaote

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-6
# The difference is taken in float32 from values that are exact there: what is lost is in X, of T additions.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
VALUES = [(1.0, 0.0), (-3.0, 5.0), (2.0, 2.0), (1.0, 1.0), (9.0, 2.0)]


def drawn(seed: int, slots: int = 110) -> dict[str, Any]:
    """Rows of scores (one may be all 0) over values in odd strides; what is not counted is NaN."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    batch, heads, rows, slots, dim = number(1, 3), number(1, 3), number(1, 5), number(12, slots), number(1, 257)
    scores = torch.rand(batch, slots, heads, rows, generator=random).permute(0, 2, 3, 1) + 0.1
    if seed % 4 == 0:
        scores[:, :, 0] = 0.0
    store = torch.randn(batch, heads, slots + 3, dim + 2, generator=random).to(DTYPES[seed % 3])
    values = store[:, :, 2 : 2 + slots, 1 : 1 + dim]
    counted = None
    if seed % 2:
        counted = torch.rand(batch, heads, slots, generator=random) < (0.6, 0.0)[seed % 11 == 0]
        values.masked_fill_(~counted[..., None], torch.nan)
    return {"scores": scores, "values": values, "counted": counted, "eps": EPS, "from_mean": bool(number(0, 2))}


def near_the_centre() -> dict[str, Any]:
    """Values 1,000 from 0 and 0.01 from each other: ||X||^2 - 2 X.v + ||v||^2 has no correct digit in float32."""
    random = torch.Generator().manual_seed(5)
    values = 1000 + 0.01 * torch.randn(1, 1, 200, 128, generator=random)
    scores = torch.rand(1, 1, 1, 200, generator=random)
    return {"scores": scores, "values": values, "counted": None, "eps": EPS}


def exactly(call: dict[str, Any]) -> Tensor:
    """The same in float64, from the definition."""
    scores, values = call["scores"].double(), call["values"].double()
    alpha = scores / scores.sum(-1, keepdim=True)
    distance = ((alpha @ values)[:, :, :, None] - values[:, :, None]).norm(dim=-1)
    return alpha / (1 - alpha) * distance


@pytest.mark.parametrize(
    ("from_mean", "expected"),
    [
        (False, [6 / 7, 5 / 3, 1 / 4, 3 / 17, 8 / 9]),
        (True, [0.958315, 1.943651, 0.0, 0.249567, 0.777778]),
    ],
)
def test_the_reference_gives_the_worked_example(from_mean: bool, expected: list[float]) -> None:
    scores = torch.tensor([[[[6.0, 5.0, 4.0, 3.0, 2.0]]]])  # over 20: example A of the specification
    errors = value_errors_ref(scores, torch.tensor([[VALUES]]), None, EPS, from_mean)
    torch.testing.assert_close(errors, torch.tensor([[[expected]]]), rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_pytorch_gives_what_the_reference_gives(seed: int) -> None:
    call = drawn(seed, slots=30)
    how = (FastCaote if call["from_mean"] else Caote)(f_norm="sum")
    got = how.eviction_error(call["scores"], call["values"], call["counted"])
    torch.testing.assert_close(got, value_errors_ref(**call), **CLOSE)


@pytest.mark.parametrize("cases", [3, pytest.param(60, marks=pytest.mark.slow("interprets kernels"))])
def test_the_kernels_give_what_the_reference_gives(cases: int, interpret: Interpreter) -> None:
    for seed in torch.randint(0, 2**31, (cases,)).tolist():
        call = drawn(seed)
        got = interpret(value_errors_triton, **call)
        torch.testing.assert_close(
            got, value_errors_ref(**call), **CLOSE, msg=lambda text, seed=seed: f"seed {seed}: {text}"
        )


def test_where_values_lie_close_together_errors_are_those_of_their_differences(interpret: Interpreter) -> None:
    near = interpret(value_errors_triton, **near_the_centre())
    # X itself, a sum of 200 numbers near 1,000, is known to 1e-4 only; of a distance of 0.11 that is one per mille.
    torch.testing.assert_close(near.double(), exactly(near_the_centre()), rtol=1e-2, atol=0)


def a_single_weight() -> dict[str, Any]:
    """Of heads of 7 slots one has a single slot that counts, one a single score that is not 0."""
    random = torch.Generator().manual_seed(2)
    scores = torch.rand(1, 2, 3, 7, generator=random) + 0.1
    scores[0, 1, :, 1:] = 0.0
    counted = torch.ones(1, 2, 7, dtype=torch.bool)
    counted[0, 0, 1:] = False
    return {"scores": scores, "values": torch.randn(1, 2, 7, 96, generator=random), "counted": counted, "eps": EPS}


def test_a_value_that_has_all_weight_is_the_centre_to_the_last_bit(interpret: Interpreter) -> None:
    """Its distance is multiplied by 1 / eps: rounded, it would outweigh all others."""
    call = a_single_weight()
    assert not interpret(value_errors_triton, **call).any()
    assert not value_errors_ref(**call).any()
    assert not Caote(f_norm="sum").eviction_error(call["scores"], call["values"], call["counted"]).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_gives_what_the_reference_gives() -> None:
    for seed in range(60):
        call = drawn(seed, 40_000 if seed % 20 == 0 else 2000)
        there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
        got = value_errors_triton(**there).cpu()
        torch.testing.assert_close(
            got, value_errors_ref(**call), **CLOSE, msg=lambda text, seed=seed: f"{seed}: {text}"
        )
    near = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in near_the_centre().items()}
    torch.testing.assert_close(
        value_errors_triton(**near).cpu().double(), exactly(near_the_centre()), rtol=1e-2, atol=0
    )

"""D2O's allocation over layers: the worked example of its specification, and exact totals whatever the variances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_crafted import observed

from kvbench.policies.allocators.d2o import InverseVariance, column_variance, fill

ATTENTION = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 2, 1 / 4, 1 / 4, 0], [1 / 2, 1 / 4, 0, 1 / 4]])
LOGS = [0.0, -math.log(2), -math.log(4)]
VARIANCES = [2.0, 5.0, 8.0]


def shares(allocator: InverseVariance, variances: list[float], total: int, floor: int, cap: int) -> list[int]:
    return allocator.share([[v] for v in variances], total, len(variances), floor, cap)


# The worked example: T = 10, three layers, rho = 0.6, at least 2 slots.


def test_the_variance_of_column_sums_is_the_hand_worked_one() -> None:
    sums = ATTENTION.sum(0)
    assert sums.tolist() == [2.5, 1.0, 0.25, 0.25]
    assert column_variance(sums[None, None, :, None], torch.ones(1, 1, 4, dtype=torch.bool)).tolist() == [[1.125]]


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("raw", (1.125 + 0.25) / 2),
        ("layer_minmax", (1.125 + 0.25) / 2),  # between the layers, later
        ("head_minmax", 0.5),  # (1 + 0) / 2
        ("per_token", (0.2109375 + 0.046875) / 2),
    ],
)
def test_what_is_measured_of_a_layer_of_two_heads(norm: str, expected: float) -> None:
    even = torch.tensor([1.0, 1.0, 1 + 0.375**0.5, 1 - 0.375**0.5])  # unbiased variance 2 * 0.375 / 3 = 0.25
    sums = torch.stack([ATTENTION.sum(0), even], dim=-1)[None, None]
    seen = observed(torch.zeros(1, 1, 4, 2))
    got = InverseVariance(norm=norm).measure(seen, {"attention_sum": sums})
    assert got.tolist() == [[pytest.approx(expected, abs=1e-5)]]


def test_empty_slots_take_no_part_in_the_variance() -> None:
    sums = torch.tensor([2.5, 7.0, 1.0, 0.25, 0.25])[None, None, :, None]
    occupied = torch.tensor([True, False, True, True, True])[None, None]
    assert column_variance(sums, occupied).tolist() == [[1.125]]


def test_real_targets_are_capped_and_the_excess_is_shared_in_proportion() -> None:
    assert fill(LOGS, 18, 2, 10) == pytest.approx([10, 5.333333, 2.666667], abs=5e-7)
    assert fill([0.0, -0.5, -1.0], 18, 2, 10) == pytest.approx([9.116647, 5.529526, 3.353827], abs=5e-7)


@pytest.mark.parametrize(
    ("allocator", "variances", "expected"),
    [
        (InverseVariance(norm="raw"), [0.0, math.log(2), math.log(4)], [10, 5, 3]),
        (InverseVariance(), VARIANCES, [9, 6, 3]),
        (InverseVariance(norm="raw"), VARIANCES, [10, 6, 2]),
        (InverseVariance(norm="raw", rounding="official"), [0.0, math.log(2), math.log(4)], [10, 5, 2]),
        (InverseVariance(allocation="reciprocal"), [1.0, 2.0, 4.0], [10, 5, 3]),  # the same shares 4 : 2 : 1
        (InverseVariance(allocation="uniform"), VARIANCES, [6, 6, 6]),
        (InverseVariance(allocation="exponential"), VARIANCES, [9, 6, 3]),
        (
            InverseVariance(allocation="exponential", rounding="official"),
            VARIANCES,
            [10, 6, 3],
        ),  # 10 times 1, .6065, .3679
        (InverseVariance(skip_layers=(0,)), VARIANCES, [10, 5, 3]),  # 8 slots in proportion e^-0.5 : e^-1
        (InverseVariance(norm="raw", rounding="official", skip_layers=(0, -1)), VARIANCES, [2**31 - 1, 2, 2**31 - 1]),
    ],
    ids=str,
)
def test_shares_of_three_layers(allocator: InverseVariance, variances: list[float], expected: list[int]) -> None:
    assert shares(allocator, variances, 18, 2, 10) == expected


# Laws.

statistic = st.one_of(st.just(0.0), st.just(math.inf), st.floats(0, 1e38), st.floats(0, 2))


@st.composite
def demands(draw: st.DrawFn) -> tuple[list[float], int, int, int]:
    """Variances of some layers, and floor <= cap and a total the layers can hold and must share."""
    variances = draw(st.lists(statistic, min_size=1, max_size=12))
    cap = draw(st.integers(1, 5000))
    floor = draw(st.integers(1, cap))
    total = draw(st.integers(floor * len(variances), cap * len(variances)))
    return variances, total, floor, cap


@given(demands(), st.sampled_from(["layer_minmax", "raw"]), st.sampled_from(["softmax", "reciprocal", "uniform"]))
def test_the_total_is_dealt_out_exactly_and_within_bounds(
    demand: tuple[list[float], int, int, int], norm: str, allocation: str
) -> None:
    variances, total, floor, cap = demand
    got = shares(InverseVariance(norm=norm, allocation=allocation), variances, total, floor, cap)
    assert sum(got) == total
    assert all(floor <= slots <= cap for slots in got)


@given(demands(), st.sampled_from(["layer_minmax", "raw"]))
def test_a_layer_of_less_variance_never_gets_less(demand: tuple[list[float], int, int, int], norm: str) -> None:
    variances, total, floor, cap = demand
    got = shares(InverseVariance(norm=norm), sorted(variances), total, floor, cap)
    assert got == sorted(got, reverse=True)


# Refusals.


def test_skipping_more_than_the_budget_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves too few for the others"):
        shares(InverseVariance(skip_layers=(0, 1)), VARIANCES, 18, 2, 10)


def test_skipping_a_layer_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_layers=3 is not allowed: the model has attention layers 0 to 2"):
        shares(InverseVariance(skip_layers=(3,)), VARIANCES, 18, 2, 10)

"""CAKE's shares over the layers: statistics and budgets worked by hand, and laws for any statistics."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cake_examples import example_a, observed
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.allocators.cake import P2A, official

ANYTHING = st.one_of(
    st.sampled_from([0.0, 1e-30, 1.0, 1e30, math.inf, math.nan]), st.floats(0, 1e6), st.integers(1, 5).map(float)
)
STATISTICS = st.lists(st.tuples(ANYTHING, ANYTHING), min_size=1, max_size=10)


def shares(p: list[float], total: int, cap: int, **fields: object) -> list[int]:
    """Slots beside the window for layers of preference P = H * V = p * 1."""
    allocator = P2A(**fields)
    return allocator.share([(x, 1.0) for x in p], total, len(p), 0, cap)


# the statistics


def test_entropy_and_variance_are_those_worked_by_hand() -> None:
    entropy, spread = P2A().measure(example_a(), {})[0].tolist()
    assert entropy == pytest.approx(3.898953, abs=5e-7)  # 5.625 ln 2; heads averaged first would give 3.46692 ln 2
    assert spread == pytest.approx(27 / 128, abs=1e-12)


@pytest.mark.parametrize(("tau1", "tau2", "preference"), [(1, 1, 0.8224354), (1.6, 0.4, 0.0478329)])
def test_preferences_are_those_worked_by_hand(tau1: float, tau2: float, preference: float) -> None:
    allocator = P2A(tau1=tau1, tau2=tau2)
    statistics = allocator.measure(example_a(), {}).tolist()
    assert allocator.preference(statistics) == [pytest.approx(preference, abs=5e-8)]


def test_an_infinite_temperature_leaves_a_statistic_out() -> None:
    assert P2A(tau2=math.inf).preference([(3.0, 5.0), (2.0, 0.0)]) == [3.0, 2.0]
    assert P2A(tau1=math.inf).preference([(3.0, 5.0), (2.0, 0.0)]) == [5.0, 0.0]


def test_statistics_in_the_models_precision_lose_small_variances() -> None:
    rows = torch.tensor([[[0.5, 0.0001, 0.4999, 0.0], [0.5, 0.0003, 0.0, 0.4997]]])
    seen = observed(rows)
    window = seen.window._replace(queries=seen.window.queries.float())
    half = replace(seen, keys=seen.keys.half(), window=window, known={})
    assert P2A().measure(seen, {})[0, 1].item() == pytest.approx(2e-8, rel=1e-3)
    assert P2A(stats_dtype="model").measure(half, {})[0, 1].item() == 0.0


# the shares


def test_budgets_with_the_window_worked_by_hand() -> None:
    statistics = [(6.0, 1.0), (3.0, 1.0), (1.0, 1.0)]
    assert P2A().share(statistics, 15, 3, 2, 12) == [7, 5, 3]
    assert P2A(rounding="official").share(statistics, 15, 3, 2, 12) == [8, 5, 2]


def test_official_rounding_worked_by_hand() -> None:
    assert official([6, 3, 1], 9, 10) == [6, 3, 0]
    assert official([6, 3, 1], 9, 4) == [4, 4, 1]
    assert official([8, 3, 1], 12, 4) == [4, 5, 3]  # the second layer beyond its cap
    assert official([1, 2, 6], 6, 10) == [1, 1, 4]
    assert official([1, 2, 6, 1], 6, 10) == [1, 2, 3, 0]


def test_official_shares_are_clipped_and_lose_slots() -> None:
    assert (P2A().exact, P2A(rounding="official").exact) == (True, False)
    assert shares([8, 3, 1], 12, 4, rounding="official", cascading=False) == [4, 4, 3]
    assert shares([8, 3, 1], 12, 4) == [4, 4, 4]


def test_an_official_cascade_does_not_return_slots() -> None:
    assert shares([1, 2, 6, 1], 6, 10, rounding="official", cascading=False) == [1, 2, 3, 0]
    assert shares([1, 2, 6, 1], 6, 10, rounding="official") == [1, 1, 3, 0]
    assert shares([1, 2, 6, 1], 6, 10) == [1, 1, 3, 1]


@given(STATISTICS, st.integers(0, 40), st.integers(0, 40), st.data())
def test_any_statistics_share_out_the_exact_total_within_bounds(
    statistics: list[tuple[float, float]], floor: int, beside: int, data: st.DataObject
) -> None:
    layers = len(statistics)
    total = floor * layers + data.draw(st.integers(0, beside * layers))
    cap = data.draw(st.integers(-(-total // layers), 200))
    allocator = P2A(tau1=data.draw(st.sampled_from([0.2, 1.0, 1.6])), tau2=data.draw(st.sampled_from([0.4, 1.0, 3.0])))
    stages = [allocator.share(statistics[:n], total, layers, floor, cap) for n in range(1, layers + 1)]
    for n, got in enumerate(stages, start=1):
        assert all(floor <= slots <= cap for slots in got)
        assert sum(got) == floor * n + min(total - floor * layers, (cap - floor) * n)
    for before, after in pairwise(stages):
        assert all(new <= old for old, new in zip(before, after, strict=False)), "evicted tokens do not come back"


@given(STATISTICS, st.integers(0, 400), st.integers(1, 60), st.booleans())
def test_official_shares_never_exceed_the_total(
    statistics: list[tuple[float, float]], total: int, cap: int, cascading: bool
) -> None:
    layers = len(statistics)
    got = P2A(rounding="official", cascading=cascading).share(statistics, total, layers, 0, cap)
    assert sum(got) <= total
    assert all(0 <= slots <= cap for slots in got)


@pytest.mark.parametrize(
    "statistics", [[(0.0, 0.0)] * 4, [(1.0, 0.0)] * 4, [(math.inf, 1.0), (1.0, 1.0)] * 2, [(math.nan, 1.0)] * 4]
)
def test_statistics_that_say_nothing_are_uniform(statistics: list[tuple[float, float]]) -> None:
    for cascading in (False, True):
        assert P2A(cascading=cascading).share(statistics, 40, 4, 0, 30) == [10] * 4

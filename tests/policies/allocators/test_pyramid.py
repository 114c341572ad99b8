"""Pyramid and random budgets: the numbers the released code gives, and totals that are exact where they should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.allocators.pyramid import Pyramid
from kvbench.policies.allocators.random import Random

WINDOW = 32


def beside_the_window(pyramid: Pyramid, budget: int, layers: int, length: int, window: int = WINDOW) -> list[int]:
    return [slots - window for slots in pyramid.split(budget * layers, layers, length, window)]


@pytest.mark.parametrize(("budget", "more"), [(64, 0.0), (128, 15.1), (256, 5.1), (512, 1.4), (1024, 1.3), (2048, 0.5)])
def test_official_floors_keep_more_than_the_budget(budget: int, more: float) -> None:
    slots = beside_the_window(Pyramid(rounding="official"), budget, 32, 8192)
    assert sum(slots) / ((budget - WINDOW) * 32) == pytest.approx(1 + more / 100, abs=6e-4)


def test_floors_of_a_small_pyramid_worked_by_hand() -> None:
    pyramid = Pyramid(beta=5, rounding="official")
    assert beside_the_window(pyramid, 12, 4, 64, window=2) == [18, 13, 8, 3]
    assert beside_the_window(Pyramid(beta=5, rounding="adakv"), 12, 4, 16, window=2) == [14, 12, 10, 8]


def test_official_is_uniform_for_prompts_shorter_than_twice_the_mean() -> None:
    pyramid = Pyramid(beta=5, rounding="official")
    assert beside_the_window(pyramid, 12, 4, 19, window=2) == [10, 10, 10, 10]
    assert beside_the_window(pyramid, 12, 4, 20, window=2) == [18, 13, 8, 3]


def test_real_slopes_are_rounded_to_the_exact_total() -> None:
    # m = 10: ends 18 and 2, step 16/3: 18, 12.67, 7.33, 2
    assert beside_the_window(Pyramid(beta=5), 12, 4, 64, window=2) == [18, 13, 7, 2]
    # 14 candidates: ends 14 and 6, step 8/3: 14, 11.33, 8.67, 6
    assert beside_the_window(Pyramid(beta=5), 12, 4, 16, window=2) == [14, 11, 9, 6]


@pytest.mark.parametrize("allocator", [Pyramid(), Pyramid(beta=2), Random(), Random(seed=7)], ids=str)
@given(st.integers(1, 80), st.integers(0, 300), st.integers(0, 40), st.integers(1, 2000), st.integers(0, 79))
def test_the_total_is_exact_and_every_layer_within_its_bounds(
    allocator: Allocator, layers: int, beside: int, window: int, length: int, odd: int
) -> None:
    total = (beside + window) * layers + odd % layers
    got = allocator.split(total, layers, length, window)
    assert len(got) == layers
    assert sum(got) == total
    if length * layers > total:
        assert all(window <= slots <= length for slots in got)
    else:
        assert all(slots >= length for slots in got), "a prompt that fits stays whole"


def test_random_shares_are_those_of_their_seed() -> None:
    first, again, other = (Random(seed).split(640, 8, 1000, 32) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert max(first) > min(first)


@pytest.mark.parametrize("allocator", [Pyramid(), Random()], ids=str)
def test_an_unknown_prompt_length_is_refused(allocator: Allocator) -> None:
    with pytest.raises(ValueError, match="prompt_length"):
        allocator.split(640, 8, None, 32)

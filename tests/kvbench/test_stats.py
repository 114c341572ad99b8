"""Intervals and comparisons, against numbers worked by hand; test_intervals_cover.py simulates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.results import statistics as stats
from kvbench.results.statistics import Difference, corrected, mean_interval, paired_difference

scores = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=30)


def test_nine_of_ten_right_gives_wilsons_interval_worked_by_hand() -> None:
    # p = .9, n = 10, z = 1.95996: centre (.9 + 3.84146/20) / 1.384146 = .78897,
    # half = 1.95996/1.384146 * sqrt(.009 + 3.84146/400) = .19313
    got = mean_interval([1.0] * 9 + [0.0])
    assert got.method == "wilson"
    assert got.low == pytest.approx(0.5958, abs=1e-4)
    assert got.high == pytest.approx(0.9821, abs=1e-4)


def test_intervals_are_those_of_scipy() -> None:
    from scipy.stats import binomtest, bootstrap  # kvbench does without: the import takes seconds

    right = mean_interval([1.0] * 3 + [0.0] * 17)
    assert (right.low, right.high) == pytest.approx(tuple(binomtest(3, 20).proportion_ci(method="wilson")))
    values = np.random.default_rng(1).random(100)
    fields = {"n_resamples": stats.RESAMPLES, "method": "percentile", "rng": np.random.default_rng(0)}
    level = 1 - 2 * stats.tails(len(values))[0]
    expected = bootstrap((values,), np.mean, confidence_level=level, **fields).confidence_interval
    found = mean_interval(values.tolist())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(scores)
def test_the_interval_holds_the_mean_and_repeats(values: list[float]) -> None:
    got = mean_interval(values)
    assert got.low - 1e-9 <= np.mean(values) <= got.high + 1e-9
    assert got == mean_interval(values)


def test_tangos_interval_of_his_paper() -> None:
    # Newcombe 1998 (Statistics in Medicine 17), table II: 36 both, 12 and 2 one only, 0 neither of 50
    first, second = [1.0] * 36 + [0.0] * 12 + [1.0] * 2, [1.0] * 36 + [1.0] * 12 + [0.0] * 2
    got = paired_difference(first, second)
    assert (got.mean, got.low, got.high) == pytest.approx((0.2, 0.0611, 0.3447), abs=1e-4)
    assert got.p == pytest.approx(2 * (1 + 14 + 91) / 2**14)  # binomial(14, 1/2): at most 2 of 14
    assert got.claims


def test_a_claim_needs_the_exact_test_and_is_corrected_for_the_number_of_comparisons() -> None:
    def lost(count: int) -> Difference:  # of 40 answers, all of which the first got right
        return paired_difference([1.0] * 40, [0.0] * count + [1.0] * (40 - count))

    five, six, nine = lost(5), lost(6), lost(9)  # p: 2/2^5, 2/2^6, 2/2^9
    assert five.high < 0, "Tango's interval excludes 0"
    assert [one.claims for one in (five, six, nine)] == [False, True, True]
    found = corrected({"six": six, "five": five, "nine": nine})
    assert [one.p for one in found.values()] == pytest.approx([2 / 32, 2 / 32, 3 * 2 / 512])  # Holm, by hand
    assert [one.claims for one in found.values()] == [False, False, True]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nothing_is_claimed_of_fewer_than_five_examples(n: int) -> None:
    for first, second in (([1.0], [0.0]), ([0.75], [0.25])):
        got = paired_difference(first * n, second * n)
        assert not got.claims
        assert got.high > got.mean, "one more example may bring the two together"


def test_the_smallest_safe_size_is_the_last_one_before_the_first_size_that_may_lose_a_point() -> None:
    def lost(low: float) -> Difference:
        return Difference(0.0, low, 0.02, 1.0, 400, "tango")

    assert stats.smallest_safe({1024: lost(-0.004), 512: lost(-0.009), 256: lost(-0.03), 128: lost(-0.002)}) == 512
    assert stats.smallest_safe({1024: lost(-0.01), 512: lost(0.0)}) is None
    assert stats.smallest_safe({1024: lost(-0.03), 512: lost(-0.04)}, margin=0.05) == 512
    # with no answer lost, z^2 / (n + z^2) is below 0.01 from 381 examples on
    for n, safe in ((380, None), (381, 64)):
        assert stats.smallest_safe({64: paired_difference([1.0] * n, [1.0] * n)}) == safe


def test_the_chance_of_a_wrong_safe_size_is_two_and_a_half_percent_over_all_sizes() -> None:
    """500 draws: at the true margin of 0.1 every size loses exactly 0.1 with n = 200."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(500):
        full = np.ones(200)
        found = {size: paired_difference(full, (rng.random(200) >= 0.1).astype(float)) for size in (1, 2, 3)}
        wrong += stats.smallest_safe(found, margin=0.1) is not None
    assert 0 < wrong <= 0.05 * 500

"""Intervals and comparisons, against numbers worked by hand and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.stats import mean_interval, paired_difference

scores = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=30)


def test_nine_of_ten_right_gives_wilsons_interval_worked_by_hand() -> None:
    # p = .9, n = 10, z = 1.95996: centre (.9 + 3.84146/20) / 1.384146 = .78897,
    # half = 1.95996/1.384146 * sqrt(.009 + 3.84146/400) = .19313
    got = mean_interval([1.0] * 9 + [0.0])
    assert got.method == "wilson"
    assert got.low == pytest.approx(0.5958, abs=1e-4)
    assert got.high == pytest.approx(0.9821, abs=1e-4)


def test_all_right_is_not_certainty() -> None:
    # Wilson with p = 1: low = n / (n + z^2) = 20 / 23.8415
    got = mean_interval([1.0] * 20)
    assert got.low == pytest.approx(20 / 23.841459, abs=1e-6)
    assert got.high == pytest.approx(1.0)


def test_graded_scores_give_an_interval_near_the_normal_one() -> None:
    values = np.random.default_rng(3).uniform(size=400).tolist()
    mean, half = np.mean(values), 1.95996 * np.std(values) / math.sqrt(400)
    got = mean_interval(values)
    assert got.method == "bootstrap"
    assert got.low == pytest.approx(mean - half, abs=0.004)
    assert got.high == pytest.approx(mean + half, abs=0.004)


def test_the_interval_covers_the_true_mean_about_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    graded = [mean_interval(rng.beta(2, 1, size=40).tolist(), seed=i) for i in range(150)]
    binary = [mean_interval((rng.uniform(size=40) < 0.8).astype(float).tolist()) for _ in range(400)]
    assert 0.88 <= np.mean([i.low <= 2 / 3 <= i.high for i in graded]) <= 0.99
    assert 0.91 <= np.mean([i.low <= 0.8 <= i.high for i in binary]) <= 0.99


@given(scores)
def test_the_interval_holds_the_mean_and_repeats(values: list[float]) -> None:
    got = mean_interval(values)
    assert got.low - 1e-9 <= np.mean(values) <= got.high + 1e-9
    assert got == mean_interval(values)


def test_no_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one score"):
        mean_interval([])


def test_equal_policies_differ_by_nothing() -> None:
    got = paired_difference([0.2, 0.9, 0.4], [0.2, 0.9, 0.4])
    assert (got.mean, got.low, got.high, got.p) == (0.0, 0.0, 0.0, 1.0)


def test_a_steady_gain_is_seen_where_unpaired_spread_hides_it() -> None:
    base = np.random.default_rng(1).uniform(0, 0.8, size=60)
    gain = np.random.default_rng(2).uniform(0.05, 0.15, size=60)
    got = paired_difference(base.tolist(), (base + gain).tolist())
    assert got.mean == pytest.approx(gain.mean())
    assert 0.05 < got.low < got.mean < got.high < 0.15
    assert got.p < 0.001
    assert mean_interval(base.tolist()).high > mean_interval((base + gain).tolist()).low  # the marginals overlap


def test_a_difference_of_noise_is_significant_in_about_one_of_twenty() -> None:
    rng = np.random.default_rng(5)
    p_values = [paired_difference([0.0] * 50, rng.normal(size=50).tolist(), seed=i).p for i in range(150)]
    assert np.mean([p < 0.05 for p in p_values]) < 0.12
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.1)


def test_lists_of_different_length_do_not_pair() -> None:
    with pytest.raises(ValueError, match="2 and 1 scores"):
        paired_difference([1.0, 0.0], [1.0])

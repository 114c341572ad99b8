"""How often 95% intervals contain the true mean, in simulations."""

from collections.abc import Callable

import numpy as np
import pytest

from kvbench.results import statistics as stats
from kvbench.results.statistics import (
    Difference,
    Interval,
    mean_interval,
    paired_difference,
    stratified_interval,
    weighted_interval,
)

Draw = Callable[[np.random.Generator, int], Interval | Difference]
LOW, HIGH = 0.905, 0.995


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of hundreds of intervals needs no fine quantiles."""
    monkeypatch.setattr(stats, "RESAMPLES", 1_000)


def f1(rng: np.random.Generator, n: int) -> np.ndarray:
    """Answers as QA scores them: 45% wrong, 30% right, the rest in between; mean .425."""
    kind = rng.uniform(size=n)
    return np.where(kind < 0.45, 0.0, np.where(kind < 0.75, 1.0, rng.beta(2, 2, size=n)))


def suite(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Eight sets as unlike as LongBench's; the mean of their means is .6125."""
    shares = [(rng.uniform(size=n) < share).astype(float) for share in (0.99, 0.9, 0.7, 0.5)]
    return [*shares, rng.beta(0.5, 1.5, size=n), rng.beta(8, 2, size=n), f1(rng, n), rng.beta(3, 7, size=n) + 0.035]


def graded(rng: np.random.Generator, n: int) -> Interval:
    return mean_interval(rng.beta(0.5, 1.5, size=n).tolist(), seed=int(rng.integers(2**31)))


def answers(rng: np.random.Generator, n: int) -> Interval:
    return mean_interval(f1(rng, n).tolist(), seed=int(rng.integers(2**31)))


def clustered(rng: np.random.Generator, n: int) -> Interval:
    """n texts, each with one to seven right-or-wrong questions that are as hard as their text; texts are resampled."""
    texts = [rng.uniform(size=rng.integers(1, 8)) < hard for hard in rng.beta(2, 2, size=n)]
    return weighted_interval([float(t.mean()) for t in texts], [len(t) for t in texts], int(rng.integers(2**31)))


def stratified(rng: np.random.Generator, n: int) -> Interval:
    return stratified_interval([scores.tolist() for scores in suite(rng, n)])


def pairs(rng: np.random.Generator, n: int) -> Difference:
    """Both right 70%, only the second 15%, only the first 5%: a difference of 0.1."""
    kind = rng.uniform(size=n)
    first, second = (kind < 0.7) | (kind >= 0.95), kind < 0.85
    return paired_difference(first.astype(float).tolist(), second.astype(float).tolist())


def graded_pairs(rng: np.random.Generator, n: int) -> Difference:
    first = rng.beta(2, 2, size=n)
    second = np.clip(first + rng.normal(0, 0.1, size=n), 0, 1)
    return paired_difference(first.tolist(), second.tolist(), seed=int(rng.integers(2**31)))


CASES: dict[str, tuple[Draw, float]] = {
    "graded": (graded, 0.25),
    "answers": (answers, 0.425),
    "clustered": (clustered, 0.5),
    "pairs": (pairs, 0.1),
    "graded pairs": (graded_pairs, 0.0),
    "stratified": (stratified, (0.99 + 0.9 + 0.7 + 0.5 + 0.25 + 0.8 + 0.425 + 0.335) / 8),
}


def coverage(name: str, n: int, times: int) -> float:
    draw, truth = CASES[name]
    rng = np.random.default_rng(n)
    got = [draw(rng, n) for _ in range(times)]
    return float(np.mean([interval.low <= truth <= interval.high for interval in got]))


@pytest.mark.parametrize(("name", "n"), [("graded", 50), ("pairs", 50), *((name, 20) for name in CASES)])
def test_intervals_cover_roughly_19_in_20(name: str, n: int) -> None:
    assert LOW <= coverage(name, n, 250) <= HIGH  # the spread of 250 draws is 1.4%

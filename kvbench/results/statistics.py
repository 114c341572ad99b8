"""Intervals of means, paired comparisons, and Holm's correction for many of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, ndtr, stdtrit

K = TypeVar("K", bound=Hashable)
CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
FEWEST = 5  # no difference is claimed below this number of examples
SAFE = 0.01  # a loss below one point is called safe
RESAMPLES = 10_000
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_BLOCK = 2_000_000  # numbers drawn at once: 16 MB, instead of 400 MB for 5,000 examples


def estimate(value: float, low: float | None, high: float | None, spec: str = ".3f", ends: str = "") -> str:
    """A number with its interval, in the notation of all tables, figures and pages: see `between`.

    spec: format of the number; ends: of the ends, if another. Without ends, the number alone.
    """
    return f"{value:{spec}}" + ("" if low is None or high is None else f" ({between(low, high, ends or spec)})")


def between(low: float, high: float, spec: str = ".3f") -> str:
    """The ends of an interval: `0.38-0.96`; with signs for a difference (`+.2f`) or a negative end: `-0.62..+0.32`."""
    if spec[:1] != "+" and low >= 0:
        return f"{low:{spec}}-{high:{spec}}"
    spec = f"+{spec.removeprefix('+')}"
    return f"{low:{spec}}..{high:{spec}}"


@dataclass(frozen=True)
class Interval:
    """A two-sided 95% confidence interval of a mean score, and its method ("wilson" or "bootstrap")."""

    low: float
    high: float
    method: str


@dataclass(frozen=True)
class Difference:
    """Mean of `second - first` over the same `n` examples, its 95% interval, a two-sided p-value, and their method.

    method: "tango" (its p is the exact McNemar test's), "bootstrap", or "floor" if all differences are equal.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    method: str

    @property
    def claims(self) -> bool:
        """Whether the two differ: p is at most 0.05, the interval excludes 0, and there are at least FEWEST examples.

        Tango's interval excludes 0 from 4 answers that only one of the two got right; the exact test needs 6.
        """
        return self.n >= FEWEST and self.p <= ALPHA and not self.low <= 0 <= self.high

    def text(self, digits: int = 3, ends: int = 3) -> str:
        """Mean, interval and, if it claims something, a star: `+0.100 (+0.050..+0.150)*`; otherwise a space."""
        return estimate(self.mean, self.low, self.high, f"+.{digits}f", f"+.{ends}f") + ("*" if self.claims else " ")


def mean_interval(scores: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of the mean of per-example scores.

    Right-or-wrong scores have Wilson's score interval, because a bootstrap of equal scores has a width of zero. Equal
    scores inside [0, 1] have it too, because m(1 - m) bounds their variance from above. All other scores have the
    percentile bootstrap over examples (10,000 resamples, seeded: same scores, same interval), with tails that are
    widened for few examples as in a t interval. Raises ValueError for an empty sequence.
    Source: Wilson 1927; Efron and Tibshirani 1993, chapter 13; Hesterberg 2015, section 5.3 (expanded percentiles).
    """
    if len(scores) == 0:
        raise ValueError("an interval needs at least one score, got none")
    values = np.asarray(scores, dtype=np.float64)
    binary = bool(np.isin(values, (0.0, 1.0)).all())
    constant_share = bool((values == values[0]).all()) and 0.0 <= values[0] <= 1.0
    if binary or constant_share:
        return _wilson(float(values.mean()), len(values))
    low, high = np.quantile(_resampled_means(values, seed), tails(len(values)))
    return Interval(float(low), float(high), "bootstrap")


def weighted_interval(values: Sequence[float], weights: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of the weighted mean of per-example values, by the percentile bootstrap over examples.

    An example that is drawn twice has its weight twice. Raises ValueError for fewer than two values.
    """
    if len(values) < 2 or len(values) != len(weights):
        raise ValueError(f"an interval needs two values or more, each with a weight, got {len(values)}, {len(weights)}")
    means = _resampled_means(np.asarray(values, dtype=np.float64), seed, np.asarray(weights, dtype=np.float64))
    low, high = np.quantile(means, tails(len(values)))
    return Interval(float(low), float(high), "bootstrap")


def stratified_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """95% interval of the mean of group means, as LongBench averages its sets.

    The groups are fixed by the benchmark, so that only the variance within them counts: a t interval with Welch and
    Satterthwaite's degrees of freedom. To a group of equal scores inside [0, 1] a score at the other end of the range
    is added for its variance, because the next score may differ (inside the range one towards each end, which
    together have the variance of one score at an end). Raises ValueError for no group, or for a group of fewer than
    two scores. Source: Satterthwaite 1946.
    """
    if not groups or min(map(len, groups)) < 2:
        raise ValueError("a stratified interval needs two scores or more in every group")
    variances = []
    for group in groups:
        first, scores = group[0], np.asarray(group, dtype=np.float64)
        ends = [end for end in (0.0, 1.0) if end != first] if min(group) == max(group) and 0 <= first <= 1 else []
        scores = np.append(scores, [first + (end - first) / sqrt(len(ends)) for end in ends])
        variances.append(float(scores.var()) / (len(group) - 1))
    weights = sum(v**2 / (len(group) - 1) for v, group in zip(variances, groups, strict=True))
    freedom = sum(variances) ** 2 / weights if weights else 1.0
    mean = float(np.mean([np.mean(group) for group in groups]))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * sqrt(sum(variances)) / len(groups)
    inside = all(0 <= score <= 1 for group in groups for score in group)
    low, high = (max(0.0, mean - half), min(1.0, mean + half)) if inside else (mean - half, mean + half)
    return Interval(low, high, "stratified t")


def paired_difference(
    first: Sequence[float], second: Sequence[float], seed: int = 0, weights: Sequence[float] | None = None
) -> Difference:
    """How much higher `second` scores than `first` on the same examples.

    weights: of the examples in the mean (numbers of tokens for NLLs); None: equal weights, as for scores.

    Right-or-wrong scores: Tango's score interval of the difference, p by the exact McNemar test; both depend on the
    examples that only one of the two got right. Equal differences between scores inside [0, 1] get the width of Tango's
    interval for examples that all agree, because the next example may not. All other values: the percentile bootstrap
    of the mean difference; p is the share of resamples with a deviation from the observed mean that is at least as
    large as that mean (the null shifted to zero), with one added to both counts so that p is never 0. Raises ValueError
    for lists of different lengths.
    Source: Tango 1998, eq. 3-4; McNemar 1947; Efron and Tibshirani 1993, chapters 13 and 16.
    """
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(f"a paired comparison needs two equally long lists, got {len(first)} and {len(second)} scores")
    both = np.asarray([first, second], dtype=np.float64)
    differences = both[1] - both[0]
    if weights is None and bool(np.isin(both, (0.0, 1.0)).all()):
        return _binary_difference(int((differences > 0).sum()), int((differences < 0).sum()), len(differences))
    if weights is None and bool((differences == differences[0]).all()) and both.min() >= 0 and both.max() <= 1:
        return _equal_difference(float(differences[0]), len(differences))
    weighing = None if weights is None else np.asarray(weights, dtype=np.float64)
    observed = float(np.average(differences, weights=weighing))
    means = _resampled_means(differences, seed, weighing)
    low, high = np.quantile(means, tails(len(differences)))
    # Equal up to rounding counts as "at least as large"; otherwise p depends on the order of summation.
    extreme = int((np.abs(means - observed) >= abs(observed) - 1e-12).sum())
    p = (extreme + 1) / (RESAMPLES + 1)
    return Difference(observed, float(low), float(high), p, len(differences), "bootstrap")


def _binary_difference(gained: int, lost: int, n: int) -> Difference:
    """gained, lost: the numbers of examples that only the second, and only the first, got right."""
    one_sided = float(bdtr(min(gained, lost), gained + lost, 0.5))
    low, high = _tango(gained, lost, n)
    return Difference((gained - lost) / n, low, high, min(1.0, 2 * one_sided), n, "tango")


def _tango(gained: int, lost: int, n: int) -> tuple[float, float]:
    """The ends of Tango's interval: the smallest and largest difference that the score test does not reject."""

    def score(delta: float) -> float:
        """The distance of the observed counts from those expected for a difference of delta, in standard errors."""
        linear = (2 * n - gained + lost) * delta - gained - lost
        nuisance = (sqrt(linear**2 + 8 * n * lost * delta * (1 - delta)) - linear) / (4 * n)  # P(only the first right)
        return (gained - lost - n * delta) / sqrt(max(n * (2 * nuisance + delta * (1 - delta)), 1e-300))

    mean, edge = (gained - lost) / n, 1 - 1e-12
    low = -1.0 if mean == -1 else brentq(lambda delta: score(delta) - _Z, -edge, mean)
    high = 1.0 if mean == 1 else brentq(lambda delta: score(delta) + _Z, mean, edge)
    return float(low), float(high)


def _equal_difference(mean: float, n: int) -> Difference:
    """For examples that all differ by `mean`: a share z^2 / (n + z^2) of other examples may differ by -1 or 1.

    This is the upper end of Wilson's and Tango's intervals for an event that never occurred in n examples.
    """
    missed = _Z**2 / (n + _Z**2)
    p = 1.0 if mean == 0 else 2.0 ** (1 - n)  # the sign test
    return Difference(mean, mean - missed * (1 + mean), mean + missed * (1 - mean), min(1.0, p), n, "floor")


def smallest_p(difference: Difference) -> float:
    """The p-value that the test of a difference would have at best with as many examples: if all of them differed."""
    return 1 / (RESAMPLES + 1) if difference.method == "bootstrap" else 2.0 ** (1 - difference.n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple comparisons, in the same order: the family-wise error rate at 0.05 is 5%.

    Source: Holm 1979: the k-th smallest of m is multiplied by m - k + 1, and the results never decrease.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def corrected(differences: Mapping[K, Difference]) -> dict[K, Difference]:
    """The same differences with p corrected for their number by `holm`, and so `claims`; intervals stay as they are."""
    adjusted = holm([one.p for one in differences.values()])
    return {key: replace(one, p=p) for (key, one), p in zip(differences.items(), adjusted, strict=True)}


def smallest_safe(differences: Mapping[float, Difference], margin: float = SAFE) -> float | None:
    """The smallest size at which a policy is shown to lose less than `margin`; None if that is shown at no size.

    differences: for each size (bytes or tokens) the difference in score from the full cache. A test of non-inferiority:
    the lower end of the 95% interval is above -margin. The sizes are tested from the largest to the first that fails,
    so that the probability of a wrong answer is at most 2.5% for all of them together.
    Source: Westfall and Krishen 2001 (fixed sequence).
    """
    safe = None
    for size in sorted(differences, reverse=True):
        if differences[size].low <= -margin:
            break
        safe = size
    return safe


def tails(n: int) -> tuple[float, float]:
    """The two percentiles of a bootstrap interval for n values, widened for small n as in Student's t."""
    if n < 2:
        return (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    tail = float(ndtr(-sqrt(n / (n - 1)) * stdtrit(n - 1, (1 + CONFIDENCE) / 2)))
    return tail, 1 - tail


def _wilson(mean: float, n: int) -> Interval:
    """Wilson's score interval of a share `mean` in `n` trials."""
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * (mean * (1 - mean) / n + _Z**2 / (4 * n**2)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "wilson")


def resampled_means(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """Means of rows of numbers [k,n] over RESAMPLES draws of their n examples, the same for all rows: [RESAMPLES,k]."""
    return np.stack([_resampled_means(row, seed) for row in rows], axis=1)


def _resampled_means(values: np.ndarray, seed: int, weights: np.ndarray | None = None) -> np.ndarray:
    """(Weighted) means of RESAMPLES draws of len(values) values with replacement: [RESAMPLES] float64."""
    n, means = len(values), []
    if n * RESAMPLES <= _BLOCK:
        times = _times_drawn(n, seed, RESAMPLES)
        found: np.ndarray = times @ values / n if weights is None else times @ (values * weights) / (times @ weights)
        return found
    for drawn in _draws(n, seed):
        if weights is None:
            means.append(values[drawn].mean(axis=1))
        else:
            means.append((values * weights)[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    return np.concatenate(means)


def _draws(n: int, seed: int) -> Iterator[np.ndarray]:
    """The places of the values that are drawn: blocks of [resamples, n], RESAMPLES rows in all."""
    rng, rows = np.random.default_rng(seed), max(1, _BLOCK // n)
    for start in range(0, RESAMPLES, rows):
        yield rng.integers(n, size=(min(rows, RESAMPLES - start), n))


@lru_cache(maxsize=4)  # the runs of a folder often have equal n, and so the same draws
def _times_drawn(n: int, seed: int, resamples: int) -> np.ndarray:
    """How often each of n values is drawn: [resamples, n] float64."""
    (drawn,) = _draws(n, seed)
    places = drawn + n * np.arange(resamples)[:, None]
    return np.bincount(places.ravel(), minlength=drawn.size).reshape(drawn.shape).astype(np.float64)

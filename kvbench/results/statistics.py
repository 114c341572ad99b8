"""Intervals of means, paired comparisons, and Holm's correction for many of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, ndtr, stdtrit

Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
FEWEST = 5  # no difference is claimed below this number of examples
RESAMPLES = 10_000
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_BLOCK = 2_000_000  # numbers drawn at once: 16 MB, instead of 400 MB for 5,000 examples


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
        """Whether the two differ: the interval excludes 0, and there are at least FEWEST examples."""
        return self.n >= FEWEST and not self.low <= 0 <= self.high


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
    low, high = np.quantile(_resampled_means(values, seed), _tails(len(values)))
    return Interval(float(low), float(high), "bootstrap")


def weighted_interval(values: Sequence[float], weights: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of the weighted mean of per-example values, by the percentile bootstrap over examples.

    An example that is drawn twice has its weight twice. Raises ValueError for fewer than two values.
    """
    if len(values) < 2 or len(values) != len(weights):
        raise ValueError(f"an interval needs two values or more, each with a weight, got {len(values)}, {len(weights)}")
    means = _resampled_means(np.asarray(values, dtype=np.float64), seed, np.asarray(weights, dtype=np.float64))
    low, high = np.quantile(means, _tails(len(values)))
    return Interval(float(low), float(high), "bootstrap")


def stratified_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """95% interval of the mean of group means, as LongBench averages its sets: every group is resampled separately.

    The groups are fixed by the benchmark, so the differences between them add no uncertainty. The deviations of group
    k's bootstrap means are scaled by sqrt(n_k / (n_k - 1)), because the bootstrap underestimates the variance of small
    groups. The percentiles are those of Student's t with Welch and Satterthwaite's degrees of freedom. A group of equal
    scores inside [0, 1] is resampled with one more score at the other end of the range, because the next score may
    differ. Raises ValueError for no group, or for a group of fewer than two scores.
    Source: Rao and Wu 1988 (rescaling bootstrap); Satterthwaite 1946.
    """
    named = dict(enumerate(groups))
    return stratified_intervals(named, {"all": list(named)}, seed)["all"]


def stratified_intervals(
    groups: Mapping[Key, Sequence[float]], means: Mapping[str, Sequence[Key]], seed: int = 0
) -> dict[str, Interval]:
    """`stratified_interval` for several means, each over some of the groups; every group is resampled once."""
    drawn = {key: _stratum(group, seed + i) for i, (key, group) in enumerate(groups.items())}
    inside = all(0 <= score <= 1 for group in groups.values() for score in group)
    least, most = (0.0, 1.0) if inside else (-inf, inf)
    intervals = {}
    for name, members in means.items():
        if not members:
            raise ValueError("a stratified interval needs two scores or more in every group, got no group")
        chosen = [drawn[key] for key in members]
        mean = float(np.mean([group.mean for group in chosen]))
        # Welch and Satterthwaite: groups with high variance and few examples lower the degrees of freedom.
        weights = sum(group.variance**2 / group.freedom for group in chosen)
        freedom = sum(group.variance for group in chosen) ** 2 / weights if weights else 1.0
        tail = float(ndtr(-stdtrit(freedom, (1 + CONFIDENCE) / 2)))
        low, high = mean + np.quantile(np.mean([group.deviations for group in chosen], axis=0), (tail, 1 - tail))
        intervals[name] = Interval(max(least, float(low)), min(most, float(high)), "stratified bootstrap")
    return intervals


@dataclass(frozen=True)
class _Stratum:
    """The mean of a group, its variance, the deviations of its bootstrap means [RESAMPLES], and its size minus one."""

    mean: float
    variance: float
    deviations: np.ndarray
    freedom: int


def _stratum(scores: Sequence[float], seed: int) -> _Stratum:
    """The bootstrap of one group.

    If all scores are equal and inside [0, 1], one more score is drawn from, at the other end of the range. A score
    inside the range has two other ends: a score is added towards each, and together they have the variance of one
    score at an end.
    """
    group = np.asarray(scores, dtype=np.float64)
    n, first = len(group), float(group[0]) if len(group) else 0.0
    if n < 2:
        raise ValueError("a stratified interval needs two scores or more in every group")
    source = group
    if (group == first).all() and 0 <= first <= 1:
        ends = [end for end in (0.0, 1.0) if end != first]
        source = np.append(group, [first + (end - first) / sqrt(len(ends)) for end in ends])
    means = np.concatenate(list(_mean_blocks(source, np.random.default_rng(seed), None, size=n)))
    deviations = (means - source.mean()) * sqrt(n / (n - 1))
    return _Stratum(float(group.mean()), float(source.var() / (n - 1)), deviations, n - 1)


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
    low, high = np.quantile(means, _tails(len(differences)))
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


def _tails(n: int) -> tuple[float, float]:
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


def _resampled_means(values: np.ndarray, seed: int, weights: np.ndarray | None = None) -> np.ndarray:
    """(Weighted) means of RESAMPLES draws of len(values) values with replacement: [RESAMPLES] float64."""
    return np.concatenate(list(_mean_blocks(values, np.random.default_rng(seed), weights)))


def _mean_blocks(
    values: np.ndarray, rng: np.random.Generator, weights: np.ndarray | None, size: int | None = None
) -> Iterator[np.ndarray]:
    """RESAMPLES means of `size` values drawn with replacement (None: all values), in blocks."""
    rows = max(1, _BLOCK // len(values))
    for start in range(0, RESAMPLES, rows):
        drawn = rng.integers(len(values), size=(min(rows, RESAMPLES - start), size or len(values)))
        if weights is None:
            yield values[drawn].mean(axis=1)
        else:
            yield (values * weights)[drawn].sum(axis=1) / weights[drawn].sum(axis=1)

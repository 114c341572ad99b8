"""How sure a score is: confidence intervals of a mean, and the paired comparison of two policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
_BLOCK = 2_000_000  # numbers drawn at once: 16 MB, so that 5,000 examples need no 400 MB matrix


@dataclass(frozen=True)
class Interval:
    """A two-sided 95% confidence interval of a mean score, and how it was found ("wilson" or "bootstrap")."""

    low: float
    high: float
    method: str


@dataclass(frozen=True)
class Difference:
    """Mean of `second - first` over the same `n` examples, its 95% interval, and a two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def mean_interval(scores: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of the mean of per-example scores.

    Right-or-wrong scores take Wilson's score interval: with few examples, or when all are right, the bootstrap would
    report a width of zero. So do equal scores inside [0, 1], for which m(1 - m) bounds the variance from above.
    Everything else takes the percentile bootstrap over examples (10,000 resamples, seeded: same scores, same interval).
    Raises ValueError for an empty sequence.
    Source: Wilson 1927; Efron and Tibshirani 1993, chapter 13.
    """
    if len(scores) == 0:
        raise ValueError("an interval needs at least one score, got none")
    values = np.asarray(scores, dtype=np.float64)
    binary = bool(np.isin(values, (0.0, 1.0)).all())
    constant_share = bool((values == values[0]).all()) and 0.0 <= values[0] <= 1.0
    if binary or constant_share:
        return _wilson(float(values.mean()), len(values))
    low, high = np.quantile(_resampled_means(values, seed), _tails())
    return Interval(float(low), float(high), "bootstrap")


def weighted_interval(values: Sequence[float], weights: Sequence[float], seed: int = 0) -> Interval:
    """95% interval of the weighted mean of per-example values, by the percentile bootstrap over examples.

    An example drawn twice brings its weight twice. Raises ValueError for fewer than two values: one says nothing of how
    much others would differ.
    """
    if len(values) < 2 or len(values) != len(weights):
        raise ValueError(f"an interval needs two values or more, each with a weight, got {len(values)}, {len(weights)}")
    means = _resampled_means(np.asarray(values, dtype=np.float64), seed, np.asarray(weights, dtype=np.float64))
    low, high = np.quantile(means, _tails())
    return Interval(float(low), float(high), "bootstrap")


def paired_difference(
    first: Sequence[float], second: Sequence[float], seed: int = 0, weights: Sequence[float] | None = None
) -> Difference:
    """How much higher `second` scores than `first` on the same examples, by the paired bootstrap.

    weights: of the examples in the mean, None where all weigh the same.

    The interval holds the percentiles of the resampled mean difference; the p-value is the share of resamples whose
    deviation from the observed mean is at least as large as that mean (the null shifted to zero), with one added to
    both counts so that it is never 0. Raises ValueError where the two do not pair up.
    Source: Efron and Tibshirani 1993, chapters 13 and 16.
    """
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(f"a paired comparison needs two equally long lists, got {len(first)} and {len(second)} scores")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    weighing = None if weights is None else np.asarray(weights, dtype=np.float64)
    observed = float(np.average(differences, weights=weighing))
    means = _resampled_means(differences, seed, weighing)
    low, high = np.quantile(means, _tails())
    # Equal up to rounding counts as "at least as large": else p depends on the order of summation.
    extreme = int((np.abs(means - observed) >= abs(observed) - 1e-12).sum())
    return Difference(observed, float(low), float(high), (extreme + 1) / (RESAMPLES + 1), len(differences))


def _tails() -> tuple[float, float]:
    return (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2


def _wilson(mean: float, n: int) -> Interval:
    """Wilson's score interval of a share `mean` seen in `n` trials."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (mean * (1 - mean) / n + z**2 / (4 * n**2)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "wilson")


def _resampled_means(values: np.ndarray, seed: int, weights: np.ndarray | None = None) -> np.ndarray:
    """(Weighted) means of RESAMPLES draws of len(values) values with replacement: [RESAMPLES] float64."""
    return np.concatenate(list(_mean_blocks(values, np.random.default_rng(seed), weights)))


def _mean_blocks(values: np.ndarray, rng: np.random.Generator, weights: np.ndarray | None) -> Iterator[np.ndarray]:
    rows = max(1, _BLOCK // len(values))
    for start in range(0, RESAMPLES, rows):
        drawn = rng.integers(len(values), size=(min(rows, RESAMPLES - start), len(values)))
        if weights is None:
            yield values[drawn].mean(axis=1)
        else:
            yield (values * weights)[drawn].sum(axis=1) / weights[drawn].sum(axis=1)

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


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """How much better `second` scores than `first` on the same examples, by the paired bootstrap.

    The interval holds the percentiles of the resampled mean difference; the p-value is the share of resamples whose
    deviation from the observed mean is at least as large as that mean (the null shifted to zero), with one added to
    both counts so that it is never 0. Raises ValueError where the two do not pair up.
    Source: Efron and Tibshirani 1993, chapters 13 and 16.
    """
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(f"a paired comparison needs two equally long lists, got {len(first)} and {len(second)} scores")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    observed = float(differences.mean())
    means = _resampled_means(differences, seed)
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


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of RESAMPLES draws of len(values) values with replacement: [RESAMPLES] float64."""
    return np.concatenate(list(_mean_blocks(values, np.random.default_rng(seed))))


def _mean_blocks(values: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    rows = max(1, _BLOCK // len(values))
    for start in range(0, RESAMPLES, rows):
        size = (min(rows, RESAMPLES - start), len(values))
        yield values[rng.integers(len(values), size=size)].mean(axis=1)

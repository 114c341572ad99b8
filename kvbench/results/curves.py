"""Curves of score over size: policies whose size depends on the data, compared with budgets at the same size.

Shapes: m runs of a policy, n examples that all of them share, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from kvbench.results import metrics
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.results.statistics import Difference, Interval, resampled_means, tails

Size = Callable[[Sample], float | None]


def kept_share(sample: Sample) -> float | None:
    """Tokens held at the end, mean over layers and KV heads, as a share of prompt and generated tokens."""
    held = metrics.mean_kept(sample)
    return None if held is None else held / (sample.prompt_tokens + (sample.decode_steps or 0))


def footprint(sample: Sample) -> float | None:
    """The KV footprint: entries held, summed over all fed tokens, as a share of the full cache's."""
    return sample.kv_footprint


def footprint_bytes(sample: Sample) -> float | None:
    """The KV footprint with the bytes of an entry: its keys and values, and what the policy stores for it."""
    held = metrics.mean_kept(sample)
    if sample.kv_footprint is None or not held or not sample.cache_bytes or not sample.full_cache_bytes:
        return None
    tokens = sample.prompt_tokens + (sample.decode_steps or 0)
    full = sample.full_cache_bytes + (sample.full_position_bytes or 0)
    return sample.kv_footprint * (sample.cache_bytes / held) / (full / tokens)


@dataclass(frozen=True)
class Curve:
    """Mean size and mean score of the runs of a policy, [m], by size, and of R resamples of the examples, [R,m]."""

    sizes: np.ndarray
    scores: np.ndarray
    resampled: tuple[np.ndarray, np.ndarray]
    n: int

    def at(self, size: float) -> float | None:
        """The score at a size, by linear interpolation; None outside the curve."""
        inside = self.sizes[0] <= size <= self.sizes[-1]
        return float(np.interp(size, self.sizes, self.scores)) if inside else None


def curves_of(groups: Sequence[Sequence[Result]], size: Size) -> list[Curve] | None:
    """The curves of groups of runs on the examples that all of them share; None without five, or without a number."""
    runs = [run for group in groups for run in group]
    known = [_by_prompt(run, size) for run in runs]
    shared = [key for key in known[0] if all(key in one for one in known)] if known else []
    if len(shared) < 5:
        return None
    values = np.asarray([[one[key] for key in shared] for one in known], dtype=np.float64)  # [runs,n,2]
    sizes, scores = values[..., 0], values[..., 1]
    drawn = resampled_means(sizes), resampled_means(scores)  # [R,runs] of the same examples
    found, begin = [], 0
    for group in groups:
        own = np.arange(begin, begin := begin + len(group))
        own = own[np.argsort(sizes[own].mean(1), kind="stable")]
        resampled = drawn[0][:, own], drawn[1][:, own]
        found.append(Curve(sizes[own].mean(1), scores[own].mean(1), resampled, len(shared)))
    return found


def _by_prompt(run: Result, size: Size) -> dict[str, tuple[float, float]]:
    """Size and score of every prompt, means over its answers; without those of which a number is unknown."""
    found = {}
    for answers in metrics.prompts_of(run.samples):
        pairs = [(size(answer), answer.score) for answer in answers]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(known) == len(pairs):
            found[answers[0].prompt_hash] = fmean(a for a, _ in known), fmean(b for _, b in known)
    return found


def difference_at(point: Curve, rival: Curve) -> Difference | None:
    """The score of one run minus the rival's curve at the run's mean size; None outside the rival's sizes.

    Resamples draw examples once for the sizes and scores of both; a resampled size beyond the curve counts as its end.
    """
    at = rival.at(float(point.sizes[0]))
    if at is None:
        return None
    own_sizes, own_scores = (x[:, 0] for x in point.resampled)
    rows = zip(own_sizes, own_scores, *rival.resampled, strict=True)
    means = np.asarray([score - np.interp(size, xs, ys) for size, score, xs, ys in rows])
    observed = float(point.scores[0]) - at
    low, high = np.quantile(means, tails(point.n))
    extreme = int((np.abs(means - observed) >= abs(observed) - 1e-12).sum())
    p = (extreme + 1) / (len(means) + 1)
    return Difference(observed, float(low), float(high), p, point.n, "bootstrap")


def smallest_size(curve: Curve, full: Curve, share: float = 0.9) -> tuple[float, Interval] | None:
    """The smallest size at which a curve reaches a share of the full cache's score, interpolated, and its interval.

    None if it is never reached. A curve that is above from its first run on has the size of that run. Resamples that
    never reach it count as infinite.
    """
    found = _crossing(curve.sizes, curve.scores, share * float(full.scores[0]))
    if found == np.inf:
        return None
    goals = share * full.resampled[1][:, 0]
    sizes = [_crossing(xs, ys, goal) for xs, ys, goal in zip(*curve.resampled, goals, strict=True)]
    low, high = np.quantile(sizes, tails(curve.n), method="nearest")
    return found, Interval(float(low), float(high), "bootstrap")


def _crossing(sizes: np.ndarray, scores: np.ndarray, goal: float) -> float:
    """The smallest size with a score of at least `goal` on the line through the runs; infinite if there is none."""
    above = np.flatnonzero(scores >= goal)
    if not len(above):
        return float(np.inf)
    last = int(above[0])
    if last == 0:
        return float(sizes[0])
    x, y = sizes[last - 1 : last + 1], scores[last - 1 : last + 1]
    return float(x[0] + (goal - y[0]) / (y[1] - y[0]) * (x[1] - x[0]))

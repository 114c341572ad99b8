"""Statistics of the divergence from the full cache: over examples, which are the units, and over all their tokens.

The statistics over tokens are those of llama.cpp's perplexity --kl-divergence. A statistic is None without compared
tokens, and if an example failed: a mean over the others would favour the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isinf, sqrt
from operator import attrgetter
from statistics import fmean, median
from typing import Literal

import numpy as np

from kvbench.results.numbers import Statistic, number
from kvbench.results.samples import Divergence, Sample
from kvbench.results.statistics import FEWEST, mean_interval, weighted_interval

PLACES = 2  # positions of a bin of `by_position` grow by this factor


def compared(samples: Sequence[Sample]) -> list[Divergence]:
    """The divergences of examples with at least one compared token; [] if an example failed or none was compared."""
    found = [sample.divergence for sample in samples if sample.divergence is not None]
    return [one for one in found if one.kl] if len(found) == len(samples) else []


def over_examples(value: Callable[[Divergence], float | None]) -> Statistic:
    """The mean over examples, without those that have no value; None if it is infinite."""

    def compute(samples: Sequence[Sample]) -> float | None:
        known = [x for one in compared(samples) if (x := value(one)) is not None]
        return _finite(fmean(known)) if known else None

    return compute


def over_tokens(
    statistic: Callable[[np.ndarray], float], of: Callable[[Divergence], Sequence[float | None]]
) -> Statistic:
    """A statistic of a value of all tokens, missing ones counting as infinite; None if it is infinite."""

    def compute(samples: Sequence[Sample]) -> float | None:
        tokens = [inf if x is None else x for one in compared(samples) for x in of(one)]
        return _finite(float(statistic(np.asarray(tokens)))) if tokens else None

    return compute


def quantile(share: float) -> Statistic:
    """A quantile of the KL of all tokens, interpolated linearly."""
    return over_tokens(
        lambda kl: float(np.quantile(kl, share, method="linear" if np.isfinite(kl).all() else "nearest")), all_kl
    )


def all_kl(one: Divergence) -> Sequence[float | None]:
    """The KL of every token."""
    return one.kl


def after_first(one: Divergence) -> float | None:
    """Mean KL without the first token, whose logits precede an eviction after the prompt."""
    return fmean(inf if kl is None else kl for kl in one.kl[1:]) if len(one.kl) > 1 else None


def end_of_kl(end: Literal["low", "high"]) -> Statistic:
    """An end of the 95% interval of the mean KL over examples (bootstrap); None for fewer than 5 or an infinite KL."""

    def compute(samples: Sequence[Sample]) -> float | None:
        means = [one.mean_kl or 0.0 for one in compared(samples)]
        if len(means) < FEWEST or any(map(isinf, means)):
            return None
        return float(getattr(weighted_interval(means, [1.0] * len(means)), end))

    return compute


def diverged(one: Divergence) -> float:
    """1.0 if the policy's own greedy answer would differ, else 0.0."""
    return float(one.first is not None)


def end_of_diverged(end: Literal["low", "high"]) -> Statistic:
    """An end of Wilson's interval of the share of answers that differ."""

    def compute(samples: Sequence[Sample]) -> float | None:
        known = [diverged(one) for one in compared(samples)]
        return float(getattr(mean_interval(known), end)) if known else None

    return compute


def first_divergence(samples: Sequence[Sample]) -> float | None:
    """The median number of tokens before an answer differs; None if half of the answers never do."""
    known = [inf if one.first is None else one.first for one in compared(samples)]
    return _finite(median(known)) if known else None


def root_mean_square(values: np.ndarray) -> float:
    """The square root of the mean square."""
    return sqrt(float(np.mean(values**2)))


def infinite(samples: Sequence[Sample]) -> float | None:
    """The number of tokens with an infinite KL; None if there is none."""
    return float(sum(kl is None for one in compared(samples) for kl in one.kl)) or None


def left_out(samples: Sequence[Sample]) -> float | None:
    """The number of examples without compared tokens; None if there is none."""
    return float(sum(sample.divergence is not None and not sample.divergence.kl for sample in samples)) or None


def number_of_tokens(samples: Sequence[Sample]) -> float | None:
    """The number of compared tokens."""
    return float(sum(len(one.kl) for one in compared(samples))) or None


def of_example(one: Divergence) -> dict[str, float | None]:
    """The numbers of one example: mean and largest KL, share of equal most likely tokens, first divergence, tokens."""
    if not one.kl:
        return {"compared_tokens": 0}
    return {
        "kl": one.mean_kl,
        "kl_max": max(inf if kl is None else kl for kl in one.kl),
        "same_top": fmean(one.same_top),
        "first_divergence": one.first,
        "compared_tokens": len(one.kl),
    }


def by_position(samples: Sequence[Sample]) -> list[tuple[float, float, int]]:
    """Mean KL by position in the answer, in bins [1, 2), [2, 4), [4, 8) ...: center, mean over examples, examples.

    The mean of a bin is over the examples that reach it, each with the mean over its tokens in the bin.
    """
    found, start = [], 1
    answers = [one.kl for one in compared(samples) if None not in one.kl]
    while reached := [kl[start - 1 : PLACES * start - 1] for kl in answers if len(kl) >= start]:
        center = sqrt(start * max(start, min(PLACES * start - 1, max(map(len, answers)))))
        found.append((center, fmean(fmean(x or 0.0 for x in kl) for kl in reached), len(reached)))
        start *= PLACES
    return found


def _finite(value: float) -> float | None:
    return None if isinf(value) else value


_number = partial(number, over="all")


@dataclass(frozen=True, kw_only=True, eq=False)
class DivergenceNumbers:
    """The divergence of a run from the full cache (task.divergence=true). Each field is a column of tables."""

    kl: float | None = _number(
        "divergence from full: KL(full || policy) per token in nats, mean over examples",
        over_examples(attrgetter("mean_kl")),
    )
    kl_low: float | None = _number("lower end of its 95% interval", end_of_kl("low"))
    kl_high: float | None = _number("upper end of its 95% interval", end_of_kl("high"))
    kl_over_tokens: float | None = _number("KL, mean over the tokens of all examples", over_tokens(np.mean, all_kl))
    kl_after_first: float | None = _number(
        "KL without the first token of every answer, mean over examples", over_examples(after_first)
    )
    kl_median: float | None = _number("median KL over tokens", quantile(0.5))
    kl_p90: float | None = _number("90th percentile of KL over tokens", quantile(0.9))
    kl_p99: float | None = _number("99th percentile of KL over tokens", quantile(0.99))
    kl_p999: float | None = _number("99.9th percentile of KL over tokens", quantile(0.999))
    kl_max: float | None = _number("largest KL of a token", quantile(1))
    kl_infinite: float | None = _number("tokens with an infinite KL; then means with them are missing", infinite)
    same_top: float | None = _number(
        "share of tokens with the same most likely next token as full, mean over examples",
        over_examples(lambda one: fmean(one.same_top)),
    )
    diverged_share: float | None = _number(
        "share of answers that greedy decoding under the policy would change", over_examples(diverged)
    )
    diverged_share_low: float | None = _number("lower end of its 95% interval (Wilson)", end_of_diverged("low"))
    diverged_share_high: float | None = _number("upper end of its 95% interval (Wilson)", end_of_diverged("high"))
    first_divergence: float | None = _number(
        "tokens before the first change, median over examples; none if half of them never change", first_divergence
    )
    delta_logprob: float | None = _number(
        "log probability of the fed token minus that under full, mean over tokens",
        over_tokens(np.mean, attrgetter("delta_logprob")),
    )
    rms_delta_p: float | None = _number(
        "root mean square change of the fed token's probability, over tokens",
        over_tokens(root_mean_square, attrgetter("delta_p")),
    )
    compared_tokens: float | None = _number("tokens compared with full", number_of_tokens)
    left_out: float | None = _number("examples without compared tokens", left_out)

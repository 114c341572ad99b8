"""What a policy changes in the answers of the full cache, example by example, from stored samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.results.pairs import shared
from kvbench.results.statistics import FEWEST, Difference, mean_interval, paired_difference
from kvbench.results.summary import Outcome


@dataclass(frozen=True)
class Share:
    """A mean over examples with its 95% interval (Wilson's for right-or-wrong answers, otherwise a bootstrap)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Changes:
    """The answers of a policy against those of the full cache to the same n prompts; None where it is not known.

    lost, gained: right under full and wrong under the policy, and the reverse; for graded scores the means of
    max(0, full - policy) and of max(0, policy - full). lost_of_right: lost as a share of the answers that are right
    under full; flips: lost + gained, both only for right-or-wrong answers. length: tokens of the answer (EOS and
    dictated tokens included) minus those of full; length_ratio: ratio of the sums. cut: share of answers that reached
    max_new_tokens minus that of full; looping: share of answers that repeat themselves until their end, minus that of
    full; rep_4: share of repeated 4-grams minus that of full. Answers that were cut off in either run are included.
    """

    n: int
    lost: Share | None
    gained: Share | None
    lost_of_right: Share | None
    flips: float | None
    length: Difference | None
    length_ratio: float | None
    cut: Difference | None
    looping: Difference | None
    rep_4: Difference | None


def changes(full: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Changes | None:
    """Compare on shared prompts; None below 5 of them, or if an example of either run failed.

    Several answers to a prompt count as their mean.
    """
    pairs = shared(full, outcomes)
    if len(pairs) < FEWEST or any(one.failed for pair in pairs for one in pair):
        return None
    scores = _known([(a.score, b.score) for a, b in pairs])
    lengths = _known([(a.length, b.length) for a, b in pairs])
    lost = [max(0.0, a - b) for a, b in scores]
    gained = [max(0.0, b - a) for a, b in scores]
    binary = bool(scores) and {value for pair in scores for value in pair} <= {0, 1}
    of_right = [float(b == 0) for a, b in scores if a == 1] if binary else []
    total = sum(a for a, _ in lengths)
    return Changes(
        n=len(pairs),
        lost=_share(lost),
        gained=_share(gained),
        lost_of_right=_share(of_right),
        flips=fmean(lost) + fmean(gained) if binary else None,
        length=_difference(lengths),
        length_ratio=sum(b for _, b in lengths) / total if total else None,
        cut=_difference(_known([(a.cut, b.cut) for a, b in pairs])),
        looping=_difference(_known([(a.looping, b.looping) for a, b in pairs])),
        rep_4=_difference(_known([(a.rep_4, b.rep_4) for a, b in pairs])),
    )


def _known(pairs: Sequence[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """The values of both runs for every pair; [] if one is unknown."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return known if len(known) == len(pairs) else []


def _share(values: Sequence[float]) -> Share | None:
    if not values:
        return None
    interval = mean_interval(values)
    return Share(fmean(values), interval.low, interval.high)


def _difference(values: Sequence[tuple[float, float]]) -> Difference | None:
    return paired_difference([a for a, _ in values], [b for _, b in values]) if values else None

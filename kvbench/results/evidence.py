"""Statistics of the evidence that a policy keeps, when the answer begins, of tasks that know where it is in the prompt.

An example with a score is right (its score is 1), or it failed: its evidence is evicted if no KV head of any layer
holds all of it, otherwise it was held and missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from kvbench.results.numbers import Statistic, number
from kvbench.results.samples import Sample
from kvbench.results.statistics import FEWEST, mean_interval, resampled_means, tails, weighted_interval
from kvbench.tasks.evidence import DISTRACTORS, EVIDENCE

RIGHT = 1 - 1e-9
Fate = Literal["right", "missed", "evicted"]
Value = Callable[[Sample], float | None]


def evidence_share(sample: Sample) -> float | None:
    """The share of the evidence held when the answer begins, mean over layers and KV heads."""
    return (sample.kept_spans_start or {}).get(EVIDENCE)


def lift(sample: Sample) -> float | None:
    """The kept share of the evidence divided by that of the prompt."""
    kept = evidence_share(sample)
    return None if kept is None or not sample.kept_prompt else kept / sample.kept_prompt


def whole_share(sample: Sample) -> float | None:
    """The share of KV heads, of all layers, that hold all of the evidence."""
    return (sample.heads_whole or {}).get(EVIDENCE)


def fate(sample: Sample) -> Fate | None:
    """What became of an example with a score and evidence."""
    whole = whole_share(sample)
    if sample.score is None or whole is None:
        return None
    return "right" if sample.score >= RIGHT else "missed" if whole else "evicted"


def _mean_of(value: Value) -> Statistic:
    def compute(samples: Sequence[Sample]) -> float | None:
        known = [x for sample in samples if (x := value(sample)) is not None]
        return fmean(known) if known else None

    return compute


def _end_of(value: Value, end: Literal["low", "high"], share: bool = True) -> Statistic:
    """An end of the 95% interval of the mean over examples. share: of values from 0 to 1; others need 5 examples."""

    def compute(samples: Sequence[Sample]) -> float | None:
        known = [x for sample in samples if (x := value(sample)) is not None]
        if not known or (not share and len(known) < FEWEST):
            return None
        return float(getattr(mean_interval(known) if share else weighted_interval(known, [1.0] * len(known)), end))

    return compute


def _share_of(kind: Fate) -> Statistic:
    return _mean_of(lambda sample: None if (found := fate(sample)) is None else float(found == kind))


def _by_fate(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """The kept evidence of right answers and of wrong ones."""
    known = [
        (found == "right", kept) for x in samples if (found := fate(x)) and (kept := evidence_share(x)) is not None
    ]
    return [kept for right, kept in known if right], [kept for right, kept in known if not right]


def right_minus_wrong(samples: Sequence[Sample]) -> float | None:
    """The mean kept evidence of right answers minus that of wrong ones."""
    right, wrong = _by_fate(samples)
    return fmean(right) - fmean(wrong) if right and wrong else None


def _end_of_difference(end: Literal["low", "high"]) -> Statistic:
    """An end of its 95% interval: both groups are resampled; None below 5 examples in one of them."""

    def compute(samples: Sequence[Sample]) -> float | None:
        right, wrong = _by_fate(samples)
        if min(len(right), len(wrong)) < FEWEST:
            return None
        first, second = (resampled_means(np.array([x]), seed)[:, 0] for seed, x in enumerate((right, wrong)))
        return float(np.quantile(first - second, tails(min(len(right), len(wrong)))[end == "high"]))

    return compute


def _part(field: Literal["kept_spans", "kept_spans_start"], name: str) -> Value:
    return lambda sample: (getattr(sample, field) or {}).get(name)


_end_kept = _part("kept_spans", EVIDENCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class EvidenceNumbers:
    """The evidence that a run kept. Each field is a column of tables."""

    kept_evidence: float | None = number(
        "share of the evidence held when the answer begins; mean over examples, layers, KV heads",
        _mean_of(evidence_share),
    )
    kept_evidence_low: float | None = number("lower end of its 95% interval", _end_of(evidence_share, "low"))
    kept_evidence_high: float | None = number("upper end of its 95% interval", _end_of(evidence_share, "high"))
    kept_evidence_end: float | None = number(
        "share of the evidence held after the last token of the answer",
        _mean_of(lambda sample: None if evidence_share(sample) is None else _end_kept(sample)),
    )
    kept_distractors: float | None = number(
        "share of the other needles held when the answer begins", _mean_of(_part("kept_spans_start", DISTRACTORS))
    )
    kept_prompt: float | None = number(
        "share of all tokens of the prompt held when the answer begins, of tasks with evidence",
        _mean_of(lambda sample: None if evidence_share(sample) is None else sample.kept_prompt),
    )
    evidence_lift: float | None = number("kept_evidence / kept_prompt, mean over examples", _mean_of(lift))
    evidence_lift_low: float | None = number("lower end of its 95% interval", _end_of(lift, "low", share=False))
    evidence_lift_high: float | None = number("upper end of its 95% interval", _end_of(lift, "high", share=False))
    heads_whole: float | None = number(
        "share of KV heads of all layers that hold all of the evidence, mean over examples", _mean_of(whole_share)
    )
    heads_whole_low: float | None = number("lower end of its 95% interval", _end_of(whole_share, "low"))
    heads_whole_high: float | None = number("upper end of its 95% interval", _end_of(whole_share, "high"))
    evidence_right: float | None = number("share of answers that are right (score 1)", _share_of("right"))
    evidence_missed: float | None = number(
        "share of answers that are wrong although a KV head holds all of the evidence", _share_of("missed")
    )
    evidence_evicted: float | None = number(
        "share of answers that are wrong and whose evidence no KV head holds as a whole", _share_of("evicted")
    )
    evidence_right_minus_wrong: float | None = number(
        "kept_evidence of right answers minus that of wrong ones", right_minus_wrong
    )
    evidence_right_minus_wrong_low: float | None = number(
        "lower end of its 95% interval (bootstrap, from 5 right and 5 wrong answers on)", _end_of_difference("low")
    )
    evidence_right_minus_wrong_high: float | None = number("upper end of its 95% interval", _end_of_difference("high"))

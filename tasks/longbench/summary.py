"""The numbers LongBench prints: percent, rounded to two decimals, per subset, bin of length, category and in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from kvbench.tasks.longbench.subsets import PAPER_SETS, SUBSETS
from kvbench.tasks.task import Scored

BINS = ("0-4k", "4-8k", "8k+")


def length_bin(length: int) -> str:
    """LongBench-E's bin of a row's `length`."""
    return BINS[0] if length < 4000 else BINS[1] if length < 8000 else BINS[2]


def percent(scores: Sequence[float]) -> float | None:
    """Mean of scores from 0 to 1 as the official code prints it; None where it prints NaN."""
    return round(100 * fmean(scores), 2) if scores else None


def by_bin(scores: Iterable[float], lengths: Iterable[int]) -> dict[str, float | None]:
    """Percent of every bin of length, None for an empty one."""
    binned: dict[str, list[float]] = {name: [] for name in BINS}
    for score, length in zip(scores, lengths, strict=True):
        binned[length_bin(length)].append(score)
    return {name: percent(members) for name, members in binned.items()}


def averages(scores: Mapping[str, float]) -> dict[str, float]:
    """Plain means over the subsets of every category, and "average" over all.

    scores: percent of every subset that ran. The average is the one papers on KV caches print where the subsets are
    their 16 (`PAPER_SETS`), and LongBench-E's where they are its 13; "average 16" is added where more than those ran.
    """
    categories: dict[str, list[float]] = {}
    for name, value in scores.items():
        categories.setdefault(SUBSETS[name].category, []).append(value)
    found = {f"category={category}": fmean(values) for category, values in categories.items()}
    found["average"] = fmean(scores.values())
    if set(PAPER_SETS) < set(scores):
        found["average 16"] = fmean(scores[name] for name in PAPER_SETS)
    return found


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """All of these for scored answers of any subsets; LongBench-E's bins where the rows are its own."""
    members: dict[str, list[Scored]] = {}
    for answer in answers:
        members.setdefault(answer.metadata["subset"], []).append(answer)
    found: dict[str, float | None] = {}
    for name, group in members.items():
        found[f"subset={name}"] = percent([score_of(answer) for answer in group])
        if all("bin" in answer.metadata for answer in group):
            bins = by_bin([score_of(answer) for answer in group], [answer.metadata["words"] for answer in group])
            found |= {f"subset={name} {label}": value for label, value in bins.items()}
    whole = {name: value for name in members if (value := found[f"subset={name}"]) is not None}
    return {**found, **averages(whole)} if len(whole) > 1 else found


def score_of(answer: Scored) -> float:
    """The score of an answer that has one."""
    assert answer.score is not None, "an answer without a score has no summary"
    return answer.score

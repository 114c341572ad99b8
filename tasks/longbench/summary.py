"""LongBench's aggregates: percent, rounded to two decimals, per subset, length bin and category, and overall."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.tasks.longbench.subsets import PAPER_SETS, SUBSETS
from kvbench.tasks.scores import by_subset, means, scores_of
from kvbench.tasks.scores import percent as percent
from kvbench.tasks.task import Scored

SUBSETS_BY = "subset"
BINS = ("0-4k", "4-8k", "8k+")


def length_bin(length: int) -> str:
    """LongBench-E's bin of a row's `length`."""
    return BINS[0] if length < 4000 else BINS[1] if length < 8000 else BINS[2]


def by_bin(scores: Iterable[float], lengths: Iterable[int]) -> dict[str, float | None]:
    """Percent of every bin of length, None for an empty one."""
    binned: dict[str, list[float]] = {name: [] for name in BINS}
    for score, length in zip(scores, lengths, strict=True):
        binned[length_bin(length)].append(score)
    return {name: percent(members) for name, members in binned.items()}


def averages(subsets: Iterable[str]) -> dict[str, list[str]]:
    """The subsets of every category, and all of them for "average".

    With the 16 subsets of `PAPER_SETS` this is the average in papers on KV caches, with the 13 subsets of LongBench-E
    its own. "average 16" is added if further subsets ran.
    """
    found: dict[str, list[str]] = {}
    for name in subsets:
        found.setdefault(f"category={SUBSETS[name].category}", []).append(name)
    found["average"] = list(subsets)
    return found | ({"average 16": list(PAPER_SETS)} if set(PAPER_SETS) < set(subsets) else {})


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Aggregates of scored answers of any subsets; with bins of length for rows of LongBench-E."""
    members = by_subset(answers, SUBSETS_BY)
    whole = {name: percent(scores_of(group)) for name, group in members.items()}
    found: dict[str, float | None] = {}
    for name, group in members.items():
        found[f"subset={name}"] = whole[name]
        if all("bin" in answer.metadata for answer in group):
            bins = by_bin(scores_of(group), [answer.metadata["words"] for answer in group])
            found |= {f"subset={name} {label}": value for label, value in bins.items()}
    return found | means(whole, averages(whole))

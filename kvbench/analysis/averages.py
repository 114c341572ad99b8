"""How sure a benchmark's own averages are: plain means over its subsets, each of which is resampled by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.analysis.statistics import stratified_intervals
from kvbench.records.sample import Sample
from kvbench.tasks.longbench.subsets import PAPER_SETS, SUBSETS

STRATA = {"longbench": "subset", "ruler": "task"}
"""The metadata key whose values a benchmark averages over with equal weights."""


def average_intervals(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """95% intervals, in percent, of the averages over subsets that `official` holds, by the same names.

    Only of averages over several subsets, each with two scores or more, and where no example failed.
    """
    groups = strata(samples)
    chosen = {
        name: members
        for name, members in _averages(groups).items()
        if len(members) > 1 and all(len(groups[member]) > 1 for member in members)
    }
    used = {key: scores for key, scores in groups.items() if len(scores) > 1}
    intervals = stratified_intervals(used, chosen) if chosen else {}
    return {name: (100 * found.low, 100 * found.high) for name, found in intervals.items()}


def strata(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Scores (0 to 1) by subset, where the benchmark averages over subsets; {} otherwise or if any score is missing."""
    keys = {STRATA.get(str(sample.metadata.get("benchmark"))) for sample in samples}
    if len(keys) != 1 or None in keys:
        return {}
    key = str(keys.pop())
    groups: dict[str, list[float]] = {}
    for sample in samples:
        if sample.score is None:
            return {}
        groups.setdefault(str(sample.metadata[key]), []).append(sample.score)
    return groups


def _averages(groups: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """Which subsets each average of `tasks.longbench.summary.averages`, or RULER's, is the mean of."""
    found = {"average": list(groups)}
    if groups and set(groups) <= set(SUBSETS):
        for name in groups:
            found.setdefault(f"category={SUBSETS[name].category}", []).append(name)
        if set(PAPER_SETS) < set(groups):
            found["average 16"] = list(PAPER_SETS)
    return found

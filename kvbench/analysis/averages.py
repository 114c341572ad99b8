"""How sure a benchmark's own averages are: plain means over its subsets, each of which is resampled by itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.analysis.statistics import stratified_intervals
from kvbench.records.sample import Sample
from kvbench.tasks.summary import by_subset, scores_of, subsets_by, summary_module


def average_intervals(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """95% intervals, in percent, of the averages over subsets that `official` holds, by the same names.

    Only of averages over several subsets, each with two scores or more, and where no example failed.
    """
    module, groups = summary_module(samples), strata(samples)
    averages: dict[str, list[str]] = module.averages(groups) if module and groups else {}
    chosen = {
        name: members
        for name, members in averages.items()
        if len(members) > 1 and all(len(groups[member]) > 1 for member in members)
    }
    used = {key: scores for key, scores in groups.items() if len(scores) > 1}
    intervals = stratified_intervals(used, chosen) if chosen else {}
    return {name: (100 * found.low, 100 * found.high) for name, found in intervals.items()}


def strata(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Scores (0 to 1) by subset, where the benchmark averages over subsets; {} otherwise or if any score is missing."""
    key = subsets_by(samples)
    if key is None or any(sample.score is None for sample in samples):
        return {}
    return {name: scores_of(group) for name, group in by_subset(samples, key).items()}

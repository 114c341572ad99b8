"""What means are over: prompts, whose answers count together, and subsets, each of which is resampled by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from kvbench.analysis.statistics import stratified_intervals
from kvbench.records.sample import Sample
from kvbench.tasks.summary import by_subset, scores_of, subsets_by, summary_module


def of_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, several answers to a prompt as the first of them with the mean score; None where one has none."""
    answers: dict[int, list[Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.index - (sample.sample or 0), []).append(sample)
    return [replace(own[0], score=_mean_score(own)) if len(own) > 1 else own[0] for own in answers.values()]


def _mean_score(answers: Sequence[Sample]) -> float | None:
    scores = [answer.score for answer in answers if answer.score is not None]
    return fmean(scores) if len(scores) == len(answers) else None


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
    return {name: scores_of(group) for name, group in by_subset(of_prompts(samples), key).items()}

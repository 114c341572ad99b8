"""Means over prompts (several answers to a prompt count as one) and over the subsets of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from kvbench.results.sample import Sample
from kvbench.results.statistics import stratified_interval
from kvbench.tasks.summary import by_subset, scores_of, subsets_by, summary_module


def of_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each prompt: its first answer, with the mean score of all; None if an answer has no score."""
    answers: dict[int, list[Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.index - (sample.sample or 0), []).append(sample)
    return [replace(group[0], score=_mean_score(group)) if len(group) > 1 else group[0] for group in answers.values()]


def _mean_score(answers: Sequence[Sample]) -> float | None:
    scores = [answer.score for answer in answers if answer.score is not None]
    return fmean(scores) if len(scores) == len(answers) else None


def average_intervals(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """95% intervals, in percent, of the averages over subsets in `official`, by the same names.

    An average has one if it is over several subsets with two scores or more each, and if no example failed.
    """
    module, groups = summary_module(samples), strata(samples)
    averages: dict[str, list[str]] = module.averages(groups) if module and groups else {}
    found = {}
    for name, members in averages.items():
        scores = [groups[member] for member in members]
        if len(scores) > 1 and min(map(len, scores)) > 1:
            interval = stratified_interval(scores)
            found[name] = 100 * interval.low, 100 * interval.high
    return found


def strata(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Scores (0 to 1) by subset; {} if a score is missing or the benchmark does not average over subsets."""
    key = subsets_by(samples)
    if key is None or any(sample.score is None for sample in samples):
        return {}
    return {name: scores_of(group) for name, group in by_subset(of_prompts(samples), key).items()}

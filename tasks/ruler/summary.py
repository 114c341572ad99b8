"""RULER's aggregates: percent of every task, rounded to two decimals, and their mean.

Source: NVIDIA/RULER at c3f5e3b, scripts/eval/evaluate.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.tasks.scores import by_subset, means, percent, scores_of
from kvbench.tasks.task import Scored

SUBSETS_BY = "task"


def averages(tasks: Iterable[str]) -> dict[str, list[str]]:
    """One mean over all tasks that ran."""
    return {"average": list(tasks)}


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Percent of every task and, if several ran, their average."""
    found = {name: percent(scores_of(group)) for name, group in by_subset(answers, SUBSETS_BY).items()}
    return {**{f"task={name}": value for name, value in found.items()}, **means(found, averages(found))}

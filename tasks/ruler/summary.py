"""RULER's table: percent of every task, rounded to two decimals, and the mean of these.

Source: NVIDIA/RULER at c3f5e3b, scripts/eval/evaluate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvbench.tasks.task import Scored


def percent(scores: Sequence[float]) -> float:
    """Mean of scores from 0 to 1, in percent, as the official code rounds it."""
    return round(100 * fmean(scores), 2)


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Percent of every task and, where several ran, their average."""
    members: dict[str, list[float]] = {}
    for answer in answers:
        assert answer.score is not None, "an answer without a score has no summary"
        members.setdefault(answer.metadata["task"], []).append(answer.score)
    found: dict[str, float | None] = {f"task={name}": percent(scores) for name, scores in members.items()}
    if len(members) > 1:
        found["average"] = fmean(percent(scores) for scores in members.values())
    return found

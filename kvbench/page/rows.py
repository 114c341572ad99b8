"""Results in the order of the page, and taken apart by task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvbench.analysis.metrics import by_value
from kvbench.analysis.result import Result
from kvbench.identity.labels import budget_order, natural
from kvbench.report.figures.panels import rank

NOTHING = "–"


def in_order(rows: Iterable[Result]) -> list[Result]:
    """By model, task and budget, policies that score alike beside each other."""
    return sorted(rows, key=lambda row: (natural(row.model), natural(row.task), budget_order(row.budget), *rank(row)))


def by_task(rows: Iterable[Result]) -> list[Result]:
    """The rows, those whose examples are of several tasks or turns taken apart, each named after its own."""
    found = []
    for row in rows:
        key = next((key for key in ("task", "turn") if len(by_value(row.samples, key)) > 1), None)
        parts = [] if key is None else row.parts(key)
        values = [part.subset.partition("=")[2] for part in parts]
        words = [f"turn {value}" if key == "turn" else value for value in values]
        found += [replace(part, task=f"{row.task}: {word}") for part, word in zip(parts, words, strict=True)] or [row]
    return found


def budget_words(budget: int | float | None) -> str:
    """128, 20%, or a dash."""
    if budget is None:
        return NOTHING
    return f"{100 * budget:g}%" if isinstance(budget, float) and budget < 1 else f"{budget:g}"

"""Bytes that the methods of a table hold at its budgets, predicted: whether "the same budget" is the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from kvbench.config.presets import make_policy
from kvbench.models.cache_shapes import CacheShape, cache_shape
from kvbench.papers import arrangement
from kvbench.papers.footnotes import letter
from kvbench.papers.layout import budget_text, label
from kvbench.papers.protocol import SCHEDULE, Cannot, Plan, plan
from kvbench.papers.published import Number
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.tools.cache_bytes import MIB, predict

Made = tuple[str, int | float | None, tuple[tuple[str, object], ...]]
"""A policy to be made: slug, budget, fields."""


def predicted(name: str, length: int) -> Grid:
    """MiB held after a prompt of `length` tokens, and in percent of the full cache: a row a method, a column a budget.

    What the numbers of a table cannot be run with, and what depends on the prompt, has a footnote. Raises UsageError
    for an unknown table.
    """
    how = arrangement.arrangement(name)
    first: dict[tuple[str, str, str], Number] = {}
    for number in arrangement.numbers(name):
        first.setdefault((number.model, number.method, budget_text(number)), number)
    budgets = list(dict.fromkeys(budget for _, _, budget in first))
    notes: dict[str, str] = {}
    blocks = []
    for model in dict.fromkeys(model for model, _, _ in first):
        methods = dict.fromkeys(method for of, method, _ in first if of == model)
        rows = []
        for method in methods:
            cells = [_cells(first.get((model, method, budget)), length, notes) for budget in budgets]
            rows.append(Row(label(how, "method", method), tuple(cell for pair in cells for cell in pair)))
        blocks.append(Block(model, tuple(rows)))
    return Grid(
        name=name,
        title=f"MiB held after a prompt of {length} tokens, and percent of the full cache, predicted",
        corner="method",
        header=tuple((budget or "no budget", what) for budget in budgets for what in ("MiB", "%")),
        blocks=tuple(blocks),
        notes=tuple((mark, sentence + ".") for sentence, mark in notes.items()),
    )


def predicted_bytes(one: Plan, length: int) -> int | None:
    """Bytes that a planned run holds after a prompt of `length` tokens; None where that depends on the prompt."""
    found = _nbytes(_hashable(one), one.model, length)
    return None if isinstance(found, str) else found


def _cells(number: Number | None, length: int, notes: dict[str, str]) -> Sequence[Cell]:
    """MiB and percent of one method at one budget; a hole with a footnote where that cannot be told."""
    if number is None:
        return Cell(""), Cell("")
    found = share(plan(number), length)
    if isinstance(found, str):
        mark = notes.setdefault(found, letter(len(notes)))
        return Cell("", notes=(mark,), hole=True), Cell("", hole=True)
    nbytes, full = found
    return Cell(f"{nbytes / MIB:.1f}"), Cell(f"{100 * nbytes / full:.1f}")


def share(own: Plan | Cannot, length: int) -> tuple[int, int] | str:
    """Bytes held and those of the full cache, or why they cannot be told."""
    if isinstance(own, Cannot):
        return f"cannot be run: {own.reason}"
    found = _nbytes(_hashable(own), own.model, length)
    return found if isinstance(found, str) else (found, _full(cache_shape(own.model), length))


def _hashable(own: Plan) -> Made:
    fields = [(k, v) for k, v in own.settings.items() if k in SCHEDULE or k.startswith("policy.")]
    return own.policy, own.budget, tuple(fields)


@cache
def _nbytes(made: Made, model: str, length: int) -> int | str:
    """Bytes of a policy's cache, or the sentence that says why they cannot be told."""
    slug, budget, fields = made
    try:
        given: dict[str, Any] = {key.removeprefix("policy."): value for key, value in fields}
        return predict(make_policy(slug, budget, **given), cache_shape(model), length).nbytes
    except ValueError as error:
        return str(error)


@cache
def _full(shape: CacheShape, length: int) -> int:
    return predict(make_policy("full"), shape, length).nbytes

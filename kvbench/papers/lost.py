"""Numbers that a table printed and its text has lost: which cells of the paper's grid they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import nan
from typing import Any

from kvbench.papers import arrangement
from kvbench.papers.footnotes import Place
from kvbench.papers.layout import Layout
from kvbench.papers.published import BASELINE, Number

ABOUT = ("table", "model", "method", "task", "metric", "budget")


@cache
def printed_cells(name: str) -> tuple[Number, ...]:
    """Every number of a table, those that its text has lost as well (their value is NaN), in the order of its cells.

    Raises UsageError for an unknown table.
    """
    table = Layout(arrangement.arrangement(name), arrangement.numbers(name))
    if not table.plan.complete:
        return tuple(table.numbers)
    places = [
        (block, row, column)
        for block in table.block_keys
        for row in table.rows_of(block)
        for column in table.column_keys
    ]
    found = [table.cells.get(place) or _lost(table, place) for place in places]
    return tuple(dict.fromkeys(number for number in found if number is not None))


def _lost(table: Layout, place: Place) -> Number | None:
    """The number of an empty cell: what its row, its column and its block have in common; None if they do not say."""
    row = [n for (_, key, _), n in table.cells.items() if key == place[1]]
    column = [n for (_, _, key), n in table.cells.items() if key == place[2]]
    block = [n for (key, _, _), n in table.cells.items() if key == place[0]]
    if all(n.method == BASELINE for n in row):
        return None  # the full cache has one budget, and stands where the paper put it
    compressed = [[n for n in line if n.method != BASELINE] for line in (block, row, column)]
    said = {field: _common(field, compressed) for field in ABOUT}
    if any(len(values) != 1 for values in said.values()):
        return None
    budgets: dict[object, str] = {n.budget: n.budget_kind for line in compressed for n in line}
    values: dict[str, Any] = {field: next(iter(of)) for field, of in said.items()}
    return replace((*row, *block)[0], **values, budget_kind=budgets[values["budget"]], value=nan, printed="", note="")


def _common(field: str, lines: list[list[Number]]) -> set[object]:
    """The value of a field that the lines through a cell share: that of the first line which has only one."""
    each = [{getattr(n, field) for n in line} for line in lines]
    return next((values for values in each if len(values) == 1), set())

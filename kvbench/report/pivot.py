"""Policies down, budgets across: the shape in which papers print their tables, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.analysis.result import Result
from kvbench.identity.labels import budget_order
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.table import (
    BUDGET,
    EXAMPLES,
    POLICY,
    STATE,
    SUBSET,
    WHEN,
    Line,
    in_blocks,
    lines_of,
    measure,
    notes,
    shared,
)

_WHOLE = "no budget"
_TITLES = ("model", "task", SUBSET)


def by_budget(rows: Sequence[Result]) -> Grid:
    """A block for each model, task, and when its rows evict, a row per policy, a column per budget, smallest first.

    A cell is the score (of given texts: the NLL) with its 95% interval. What has no budget, as the full cache, stands
    in a column of its own.
    """
    lines, below = lines_of(rows)
    differs = {name for name in lines[0].words if len({line.words[name] for line in lines}) > 1}
    blocks = in_blocks(lines, [name for name in _TITLES if name in differs])
    budgets = sorted({line.row.budget for line in lines}, key=budget_order)
    told = [name for name in lines[0].words if name in differs - {*_TITLES, POLICY, BUDGET, EXAMPLES, STATE, WHEN}]
    same = shared(lines[0].words, set(lines[0].words) - differs - {POLICY, BUDGET})
    return Grid(
        name="",
        title=": ".join(filter(None, [f"{_what(rows)} (95% CI) by budget", same])),
        corner=POLICY,
        header=tuple((_WHOLE if budget is None else str(budget),) for budget in budgets),
        blocks=tuple(Block(title, _rows(members, budgets, told)) for title, members in blocks.items()),
        notes=tuple(("", note) for note in [*_legend(rows), *below, *notes(rows)]),
    )


def _rows(lines: Sequence[Line], budgets: Sequence[float | None], told: Sequence[str]) -> tuple[Row, ...]:
    """A row for each policy; where several runs of it differ in a field, one for each of its values."""
    found: dict[str, dict[float | None, str]] = {}
    for line in lines:
        label = " ".join([line.words[POLICY], *(f"{name}={line.words[name]}" for name in told)])
        cells = found.setdefault(label, {})
        cells[line.row.budget] = "; ".join(filter(None, (cells.get(line.row.budget), _cell(line))))
    return tuple(Row(label, tuple(_at(cells, budget) for budget in budgets)) for label, cells in found.items())


def _at(cells: Mapping[float | None, str], budget: float | None) -> Cell:
    return Cell(cells.get(budget, ""), hole=budget not in cells)


def _cell(line: Line) -> str:
    row = line.row
    if not row.finished:
        return row.state.partition(":")[0]
    return measure(row) + ("*" if row.difference and row.difference.claims else "")


def _what(rows: Sequence[Result]) -> str:
    reads = {row.reads for row in rows if row.finished}
    known = {False: "score", True: "NLL in nats per token, lower is better"}
    return " or ".join(words for kind, words in known.items() if kind in reads)


def _legend(rows: Sequence[Result]) -> list[str]:
    told = ["budget: tokens that a KV head may keep, on average (below 1: share of the prompt)"]
    if any(row.baseline is not None for row in rows):
        told.append("*: the 95% interval of the difference to full on the same examples leaves out 0")
    return told

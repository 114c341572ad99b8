"""A published table in its paper's own layout, as a grid. What is bold or underlined is derived from the print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from kvbench.papers import arrangement as arrangements
from kvbench.papers.arrangement import Arrangement
from kvbench.papers.footnotes import Footnotes, Key, Place
from kvbench.papers.published import BASELINE, Number
from kvbench.report.grid import BEST, SECOND, Block, Cell, Grid, Row

LOWER_IS_BETTER = re.compile(r"perplexity|seconds|minutes|_ms_|GB$|gap|drop")
BY_BUDGET = ("tokens_per_head", "ratio")
FEWEST_IN_CATEGORIES = 10  # LongBench's categories stand above the tasks where so many of its tasks are columns


def lay_out(name: str) -> Grid:
    """The published table `name` as a grid. Raises UsageError for an unknown table."""
    return grid_of(name, arrangements.arrangement(name), arrangements.numbers(name))


def grid_of(name: str, plan: Arrangement, numbers: Sequence[Number]) -> Grid:
    """Numbers laid out as a table."""
    table = Layout(plan, numbers)
    notes = Footnotes(table.cells, [(block, row) for block in table.block_keys for row in table.rows_of(block)])
    blocks = tuple(_block(table, notes, key) for key in table.block_keys)
    holes = any(cell.hole for block in blocks for row in block.rows for cell in row.cells)
    return Grid(
        name=name,
        title=plan.title + (f" (section {plan.section})" if plan.section else ""),
        corner=plan.corner or plan.rows[0],
        header=tuple(table.words(table.columns, key) for key in table.column_keys),
        blocks=blocks,
        notes=(*(("", sentence) for sentence in _legend(plan, holes)), *notes.sentences),
        column_notes=tuple(notes.of_column(key) for key in table.column_keys),
    )


class Layout:
    """Where each number of a table stands: (block, row, column), each a tuple of values of its fields."""

    def __init__(self, plan: Arrangement, numbers: Sequence[Number]) -> None:
        self.plan = plan
        self.numbers = numbers
        self.values = [values(number, plan.split) for number in numbers]
        self.columns = plan.columns if plan.columns is not None else self._default_columns()
        self.blocks = plan.blocks if plan.blocks is not None else self._default_blocks()
        self.cells = self._cells()
        self.block_keys = list(dict.fromkeys(block for block, _, _ in self.cells))
        self.column_keys = self._column_keys()

    def _several(self, field: str) -> bool:
        return len({one[field] for one in self.values}) > 1

    def _default_columns(self) -> tuple[str, ...]:
        in_categories = {one["task"] for one in self.values if one["category"]}
        columns = ("category", "task") if len(in_categories) >= FEWEST_IN_CATEGORIES else ("task",)
        return (*columns, "metric") if self._several("metric") else columns

    def _default_blocks(self) -> tuple[str, ...]:
        budgets = {(n.budget_kind, n.budget) for n in self.numbers if n.budget_kind in BY_BUDGET}
        return (*(["model"] if self._several("model") else []), *(["budget"] if len(budgets) > 1 else []))

    def _cells(self) -> dict[Place, Number]:
        cells: dict[Place, Number] = {}
        for number, given in zip(self.numbers, self.values, strict=True):
            for one in self._copies(number, given):
                place = (_key(one, self.blocks), _key(one, self.plan.rows), _key(one, self.columns))
                if place in cells:
                    other = cells[place]
                    raise ValueError(f"{number.name}: {other.printed} and {number.printed} stand in one cell {place}")
                cells[place] = number
        return cells

    def _copies(self, number: Number, given: dict[str, str]) -> list[dict[str, str]]:
        if not (self.plan.repeat_full and number.method == BASELINE):
            return [given]
        return [{**given, "budget": b} for b in dict.fromkeys(one["budget"] for one in self.values if one["budget"])]

    def _column_keys(self) -> list[Key]:
        """Columns under the same heading stand together, in the order of the print, or of labels that name them all."""
        keys = list(dict.fromkeys(column for _, _, column in self.cells))
        return sorted(keys, key=lambda key: [self._order(keys, key[: level + 1]) for level in range(len(key))])

    def _order(self, keys: Sequence[Key], heading: Key) -> int:
        """The place of a heading, said from the outermost to itself, among those beside it."""
        level = len(heading) - 1
        named = list(self.plan.labels.get(self.columns[level], {}))
        if {key[level] for key in keys} <= set(named):
            return named.index(heading[level])
        return next(place for place, key in enumerate(keys) if key[: level + 1] == heading)

    @cached_property
    def compressed_rows(self) -> list[Key]:
        """Rows that some number other than the full cache's stands in, in the order of the print."""
        return list(dict.fromkeys(row for (_, row, _), n in self.cells.items() if n.method != BASELINE))

    def rows_of(self, block: Key) -> list[Key]:
        """The rows of a block: those that have a number and, where all blocks are alike, those that have lost all."""
        own = list(dict.fromkeys(row for (at, row, _) in self.cells if at == block))
        if not self.plan.complete or not set(own) & set(self.compressed_rows):
            return own
        return [*(row for row in own if row not in self.compressed_rows), *self.compressed_rows]

    def words(self, fields: Sequence[str], key: Key) -> tuple[str, ...]:
        """What is printed for the values of some fields."""
        return tuple(label(self.plan, field, value) for field, value in zip(fields, key, strict=True))


def values(number: Number, split: Mapping[str, str]) -> dict[str, str]:
    """Every field of a number by which a table may be laid out, as text."""
    found = {
        "table": number.table,
        "model": number.model,
        "method": number.method,
        "budget": budget_text(number),
        "task": number.task,
        "metric": number.metric,
        "category": arrangements.names().categories.get(number.task, ""),
    }
    for field, pattern in split.items():
        match = re.fullmatch(pattern, found[field])
        if match is None:
            raise ValueError(f"{number.name}: {field} {found[field]!r} is not of the form {pattern}")
        found |= match.groupdict(default="")
    return found


def budget_text(number: Number) -> str:
    """`2048`, `20%` or `2 bits`; empty where there is none."""
    if number.budget is None:
        return ""
    if number.budget_kind == "ratio":
        return f"{100 * number.budget:g}%"
    return f"{number.budget:g} bits" if number.budget_kind == "bits" else str(number.budget)


def label(plan: Arrangement, field: str, value: str) -> str:
    """The words for a value of a field: the table's own, those of all papers, or the value."""
    shared = arrangements.names().labels.get(field, {})
    return plan.labels.get(field, {}).get(value, shared.get(value, value))


def _key(given: Mapping[str, str], fields: Sequence[str]) -> Key:
    return tuple(given[field] for field in fields)


def _block(table: Layout, notes: Footnotes, block: Key) -> Block:
    rows = table.rows_of(block)
    marks = {column: _marks(table, block, rows, column) for column in table.column_keys}
    laid = []
    for row in rows:
        cells = tuple(_cell(table, notes, (block, row, column), marks[column]) for column in table.column_keys)
        laid.append(Row(" ".join(filter(None, table.words(table.plan.rows, row))), cells, notes.of_row(block, row)))
    return Block(_block_title(table, block), tuple(laid))


def _block_title(table: Layout, block: Key) -> str:
    titles = []
    for field, words in zip(table.blocks, table.words(table.blocks, block), strict=True):
        if words:
            titles.append(f"budget {words}" if field == "budget" and words[0].isdigit() else words)
    return ", ".join(titles)


def _cell(table: Layout, notes: Footnotes, place: Place, marks: Mapping[Key, str]) -> Cell:
    number = table.cells.get(place)
    if number is None:
        return Cell("", hole=table.plan.complete)
    return Cell(number.printed, marks.get(place[1], ""), notes.of_cell(place))


def _marks(table: Layout, block: Key, rows: Sequence[Key], column: Key) -> dict[Key, str]:
    """Best and second best of a block's column, full cache aside; none where a rival is lost or there is no rival."""
    places = {row: table.cells.get((block, row, column)) for row in rows if row in table.compressed_rows}
    if not table.plan.marks or len(places) < 2 or None in places.values():
        return {}
    found = {row: number for row, number in places.items() if number is not None}
    sign = -1 if LOWER_IS_BETTER.search(next(iter(found.values())).metric) else 1
    ranked = sorted({sign * number.value for number in found.values()}, reverse=True)
    names = {value: mark for value, mark in zip(ranked, (BEST, SECOND), strict=False) if mark in table.plan.marks}
    return {row: names[sign * n.value] for row, n in found.items() if sign * n.value in names}


def _legend(plan: Arrangement, holes: bool) -> list[str]:
    said = []
    if plan.marks:
        marked = "best of its block in bold (*)" + (", second best underlined (+)" if SECOND in plan.marks else "")
        said.append(f"Derived from the printed numbers: {marked}; no mark in a column that has lost a rival's number.")
    if holes:
        said.append(f"– is a number that the text of the paper has lost: {plan.holes or 'not legible'}.")
    return said

"""A published table in the layout of its paper: results/paper/<paper>/layout.yaml and results/paper/names.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvbench.config.compose import load
from kvbench.papers import published
from kvbench.papers.published import BASELINE, Number
from kvbench.report.text_table import TextTable, table_of

HOLE = "–"
LOWER_IS_BETTER = re.compile(r"perplexity|seconds|minutes|_ms_|GB$|gap|drop")
SIGNS = {"best": "*", "second": "+"}
Key = tuple[str, ...]


@dataclass(frozen=True)
class TableLayout:
    """The layout of a table. rows, columns, blocks: fields of a number, or groups of the expressions in `split`.

    section: of the paper. parts: the CSV files that the paper prints as one table. split: field -> regular expression
    with named groups. marks: the marks of the paper in each column of a block (best, second). complete: every block has
    the same rows; missing numbers are illegible in the paper, as `holes` describes. repeat_full: print the full cache
    at every budget. labels: field -> value -> text.
    """

    title: str
    section: str = ""
    parts: Sequence[str] = ()
    rows: Sequence[str] = ("method",)
    columns: Sequence[str] = ()
    blocks: Sequence[str] | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[str] = ()
    complete: bool = True
    holes: str = ""
    repeat_full: bool = False
    corner: str = ""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def label(self, name: str, value: str) -> str:
        """The label of a value: that of the table, that of all papers, or the value itself."""
        return self.labels.get(name, {}).get(value, names()["labels"].get(name, {}).get(value, value))


@cache
def names() -> dict[str, Any]:
    """results/paper/names.yaml: `labels` of fields, LongBench's `categories`, and the `models` of conf/model."""
    return dict(load(published.FOLDER / "names.yaml"))


@cache
def longbench() -> tuple[str, ...]:
    """The tasks of LongBench, in the order of its table."""
    return tuple(task for tasks in names()["categories"].values() for task in tasks)


@cache
def read_yaml(path: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    """A file of results/paper. The caller must not modify the result."""
    return load(published.FOLDER / path)


@cache
def layout(name: str) -> TableLayout:
    """The layout of `caote/table2`. Raises UsageError for an unknown table."""
    given = _layouts(name).get(name) or _layouts(name).get(whole(name))
    if given is None:
        published.read_table(name)
        raise ValueError(f"results/paper/{name.partition('/')[0]}/layout.yaml has no entry for {name}")
    labels = {key: {str(k): str(v) for k, v in of.items()} for key, of in given.get("labels", {}).items()}
    return TableLayout(**{**given, "labels": labels})


def _layouts(name: str) -> dict[str, dict[str, Any]]:
    paper = name.partition("/")[0]
    known = read_yaml(f"{paper}/layout.yaml") if paper in published.papers() else {}
    return {f"{paper}/{table}": given for table, given in known.items()}


def tables(paper: str | None = None) -> tuple[str, ...]:
    """The names of all printed tables, or of one paper; CSV files that form one table have one name."""
    return tuple(dict.fromkeys(whole(name) for name in published.tables(paper)))


def whole(name: str) -> str:
    """The printed table that contains a CSV file, or the CSV file itself."""
    table = name.partition("/")[2]
    return next((one for one, given in _layouts(name).items() if table in given.get("parts", ())), name)


def numbers(name: str) -> tuple[Number, ...]:
    """The numbers of a printed table, or of one CSV file. Raises UsageError for an unknown one."""
    paper = name.partition("/")[0]
    parts = _layouts(name).get(name, {}).get("parts")
    parts = [name] if parts is None else [f"{paper}/{part}" for part in parts]
    return tuple(number for part in parts for number in published.read_table(part))


def budget_text(number: Number) -> str:
    """`2048`, `20%` or `2 bits`; empty without a budget."""
    if number.budget is None:
        return ""
    if number.budget_kind == "ratio":
        return f"{100 * number.budget:g}%"
    return f"{number.budget:g} bits" if number.budget_kind == "bits" else str(number.budget)


def lay_out(name: str) -> TextTable:
    """The published table `name`; * and + mark the best and second best number of a block. UsageError if unknown."""
    grid = _Grid(layout(name), numbers(name))
    own = grid.layout
    titles = [words(own, grid.columns, key) for key in grid.column_keys]
    inner = [title[-1] for title in titles]
    header = inner if len({*inner}) == len(inner) else [" ".join(filter(None, title)) for title in titles]
    rows = [
        [*words(own, grid.blocks, block), " ".join(filter(None, words(own, own.rows, row))), *cells]
        for block in grid.block_keys
        for row in grid.rows_of(block)
        for cells in [[grid.text((block, row, column)) for column in grid.column_keys]]
    ]
    first = [*grid.blocks, own.corner or " ".join(own.rows)]
    title = f"{name}: {own.title}" + (f" (section {own.section})" if own.section else "")
    notes = _notes(grid, any(HOLE in row for row in rows))
    return table_of([*first, *header], rows, title, left=first, notes=notes, groups=grid.blocks)


def words(own: TableLayout, fields: Sequence[str], key: Key) -> list[str]:
    """The labels of the values of some fields."""
    return [own.label(name, value) for name, value in zip(fields, key, strict=True)]


def _notes(grid: _Grid, has_holes: bool) -> list[str]:
    own, notes = grid.layout, []
    if own.marks:
        second = ", + the second best" if "second" in own.marks else ""
        notes.append(f"* marks the best number of its block{second}; columns with a missing number have no mark.")
    if own.complete and has_holes:
        notes.append(f"{HOLE}: the number is missing in the text of the paper: {own.holes or 'not legible'}.")
    about: dict[str, list[Number]] = {}
    for number in dict.fromkeys(grid.cells.values()):
        for part in filter(None, number.note.split("; ")):
            about.setdefault(part, []).append(number)
    for note, of in about.items():
        place = f"{own.label('method', of[0].method)}, {own.label('task', of[0].task)} {of[0].printed}"
        several = f"{place} and {len(of) - 1} more: " if len(of) > 1 else f"{place}: "
        notes.append(f"{'' if len(of) == len(grid.numbers) else several}{note.rstrip('.')}.")
    return notes


class _Grid:
    """The place of every number of a table: (block, row, column), each a tuple of values of fields."""

    def __init__(self, own: TableLayout, found: Sequence[Number]) -> None:
        self.layout, self.numbers = own, found
        values = [_values(number, own.split) for number in found]
        several = {name: len({one[name] for one in values}) > 1 for name in ("model", "budget", "metric")}
        by_budget = {budget_text(n) for n in found if n.budget_kind in ("tokens_per_head", "ratio")}
        self.columns = [*own.columns] or ["task", *(["metric"] if several["metric"] else [])]
        split = {"model": several["model"], "budget": len(by_budget - {""}) > 1}
        self.blocks = [name for name, is_split in split.items() if is_split] if own.blocks is None else [*own.blocks]
        self.cells: dict[tuple[Key, Key, Key], Number] = {}
        budgets = dict.fromkeys(one["budget"] for one in values if one["budget"])
        for number, given in zip(found, values, strict=True):
            repeated = own.repeat_full and number.method == BASELINE
            for one in [{**given, "budget": budget} for budget in budgets] if repeated else [given]:
                place = (_key(one, self.blocks), _key(one, own.rows), _key(one, self.columns))
                if place in self.cells:
                    raise ValueError(f"{number.name}: two numbers in one cell {place}")
                self.cells[place] = number
        self.block_keys = list(dict.fromkeys(block for block, _, _ in self.cells))
        keys = list(dict.fromkeys(column for _, _, column in self.cells))
        self.column_keys = sorted(keys, key=lambda key: [self._order(keys, key[: i + 1]) for i in range(len(key))])
        compressed = (row for (_, row, _), number in self.cells.items() if number.method != BASELINE)
        self.compressed = list(dict.fromkeys(compressed))

    def _order(self, keys: Sequence[Key], heading: Key) -> int:
        """The index of a heading: in the labels if they contain all headings, else in print order."""
        level = len(heading) - 1
        named = list(self.layout.labels.get(self.columns[level], {}))
        if {key[level] for key in keys} <= {*named}:
            return named.index(heading[level])
        return next(place for place, key in enumerate(keys) if key[: level + 1] == heading)

    def rows_of(self, block: Key) -> list[Key]:
        """The rows of a block; if all blocks have the same rows, including rows without numbers."""
        own = list(dict.fromkeys(row for (at, row, _) in self.cells if at == block))
        if not self.layout.complete or not {*own} & {*self.compressed}:
            return own
        return [*(row for row in own if row not in self.compressed), *self.compressed]

    def text(self, place: tuple[Key, Key, Key]) -> str:
        """The printed digits with their mark, or a hole."""
        block, row, column = place
        if place not in self.cells:
            return HOLE if self.layout.complete else ""
        column_numbers = [self.cells.get((block, one, column)) for one in self.rows_of(block) if one in self.compressed]
        known = [number for number in column_numbers if number is not None]
        number = self.cells[place]
        if (
            not self.layout.marks
            or row not in self.compressed
            or len(column_numbers) < 2
            or len(known) < len(column_numbers)
        ):
            return number.printed
        sign = -1 if LOWER_IS_BETTER.search(known[0].metric) else 1
        ranked = sorted({sign * one.value for one in known}, reverse=True)
        marks = dict(zip(ranked, SIGNS, strict=False))
        mark = marks.get(sign * number.value, "")
        return number.printed + (SIGNS[mark] if mark in self.layout.marks else "")


def _values(number: Number, split: Mapping[str, str]) -> dict[str, str]:
    """The fields of a number that a layout may use, as text."""
    found = {name: str(getattr(number, name)) for name in ("table", "model", "method", "task", "metric")}
    found["budget"] = budget_text(number)
    for name, pattern in split.items():
        match = re.fullmatch(pattern, found[name])
        if match is None:
            raise ValueError(f"{number.name}: {name} {found[name]!r} does not match {pattern}")
        found |= match.groupdict(default="")
    return found


def _key(given: Mapping[str, str], fields: Sequence[str]) -> Key:
    return tuple(given[name] for name in fields)

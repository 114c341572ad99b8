"""A table as it is shown: blocks of rows, columns with one or several levels of heading, marks and footnotes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

BEST, SECOND = "best", "second"
HOLE = "–"
COMMAND = "python -m "  # notes that begin so are commands


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, its mark (`best`, `second` or none), and letters of footnotes.

    hole: there is a number in the paper, or a run to be made, but it is not here.
    """

    text: str
    mark: str = ""
    notes: tuple[str, ...] = ()
    hole: bool = False


@dataclass(frozen=True)
class Row:
    """A label, letters of footnotes that hold for all of it, and a cell for every column."""

    label: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    @property
    def head(self) -> Cell:
        """The label with its footnotes."""
        return Cell(self.label, notes=self.notes)


@dataclass(frozen=True)
class Block:
    """Rows under a common title ("" where the table has a single block)."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Grid:
    """A whole table. header: the labels of every column, outermost level first; column_notes: letters of each.

    corner: what the row labels are. left: columns of words, which are not set as numbers are. notes: (letter,
    sentence); those without a letter hold for the whole table. keys: so many first columns tell a row apart together
    with its label, and are repeated where columns are folded.
    """

    name: str
    title: str
    corner: str
    header: tuple[tuple[str, ...], ...]
    blocks: tuple[Block, ...]
    notes: tuple[tuple[str, str], ...] = ()
    column_notes: tuple[tuple[str, ...], ...] = ()
    left: tuple[int, ...] = ()
    keys: int = 0

    @property
    def cells(self) -> Iterator[Cell]:
        """Every cell, block by block, row by row."""
        return (cell for block in self.blocks for row in block.rows for cell in row.cells)

    def notes_of(self, column: int) -> tuple[str, ...]:
        """Letters of the footnotes of a column."""
        return self.column_notes[column] if self.column_notes else ()

    @property
    def flat_header(self) -> tuple[str, ...]:
        """A label for each column: the innermost, preceded by the outer ones where it is not unique."""
        inner = [labels[-1] for labels in self.header]
        if len(set(inner)) == len(inner):
            return tuple(inner)
        return tuple(" ".join(dict.fromkeys(label for label in labels if label)) for labels in self.header)


def heading(grid: Grid) -> str:
    """The heading of a table: its name, if any, and its title."""
    return ": ".join(filter(None, (grid.name, grid.title)))


def spans(grid: Grid, level: int) -> list[tuple[Cell, int, int]]:
    """(heading, columns it spans, first of them); the innermost level spans one each, and has their footnotes."""
    if level == len(grid.header[0]) - 1:
        return [(Cell(labels[level], notes=grid.notes_of(i)), 1, i) for i, labels in enumerate(grid.header)]
    spans, start = [], 0
    for key, group in groupby(grid.header, key=lambda labels: labels[: level + 1]):
        count = len(list(group))
        spans.append((Cell(key[level]), count, start))
        start += count
    return spans

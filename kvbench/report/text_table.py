"""Tables of text: aligned columns with a title and notes, folded to the width of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvbench.terminal.escapes import visible

NONE = "-"
NOTE_WIDTH = 100  # characters of a line of notes below a narrow table
_CONSOLE = Console()


@dataclass(frozen=True)
class TextTable:
    """A table for people. frame: cells of text. left: left-aligned columns. groups: rows with different values in these
    columns are separated by a line. notes: sentences below the table.
    """

    frame: pd.DataFrame
    title: str = ""
    notes: Sequence[str] = ()
    left: Sequence[str] = ()
    groups: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Names in files of others may contain line breaks, and escape sequences of a terminal."""
        shown = self.frame.map(lambda cell: visible(str(cell))).rename(columns=lambda name: visible(str(name)))
        object.__setattr__(self, "frame", shown)
        object.__setattr__(self, "title", visible(self.title))
        for name in ("notes", "left", "groups"):
            object.__setattr__(self, name, [visible(str(words)) for words in getattr(self, name)])


def table_of(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    left: Sequence[str] = (),
    notes: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> TextTable:
    """A table of rows of text: see `TextTable`."""
    return TextTable(frame_of(names, list(zip(*rows, strict=True)) or [[] for _ in names]), title, notes, left, groups)


def frame_of(names: Sequence[str], columns: Sequence[Sequence[str]]) -> pd.DataFrame:
    """A DataFrame of text, from its columns."""
    frame = pd.DataFrame({place: list(column) for place, column in enumerate(columns)}, dtype=object)
    return frame.set_axis(list(names), axis="columns")


def text(table: TextTable, width: int | None = None) -> str:
    """Aligned columns. width: characters of a line, to which the columns are folded; None: unlimited."""
    frame = table.frame
    keys = [tuple(row) for row in frame[list(table.groups)].to_numpy()]
    ends = [key != following for key, following in zip(keys, [*keys[1:], *keys[-1:]], strict=True)]
    headings = []
    for name in frame.columns:
        longest = max((len(line) for cell in frame[name] for line in cell.split("\n")), default=0)
        headings.append(_folded(str(name), max([longest, *map(len, str(name).split())])))
    rows, left = list(frame.itertuples(index=False)), [name in table.left for name in frame.columns]
    body = _aligned(headings, rows, ends, left)
    if width is not None and max(map(cell_len, body)) > width:
        widths = _fitting([headings, *rows], width)
        folded = [[*map(_folded, row, widths)] for row in (headings, *rows)]
        body = _aligned(folded[0], folded[1:], ends, left)
    notes_width = min(width or 10_000, max([NOTE_WIDTH, *map(len, body)]))
    title, *notes = (_folded(words, notes_width) for words in (table.title, *table.notes))
    return "\n\n".join(filter(None, [title, "\n".join(body), "\n".join(notes)])) + "\n"


def _aligned(
    headings: Sequence[str], rows: Sequence[Sequence[str]], ends: Sequence[bool], left: Sequence[bool]
) -> list[str]:
    """The lines of a table. ends: an empty line follows the row."""
    rule: Sequence[str] = ()
    lines: list[Sequence[str]] = []
    for row, end in zip([headings, *rows], [False, *ends], strict=True):
        cells = [cell.split("\n") for cell in row]
        high = max(map(len, cells), default=0)
        lines += zip(*([""] * (high - len(cell)) + cell for cell in cells), strict=True)  # cells end in the same line
        lines += [rule] if row is headings else [[""] * len(row)] * end
    widths = [max(map(cell_len, column)) for column in zip(*(line for line in lines if line is not rule), strict=True)]
    found = []
    for line in lines:
        spaces = [" " * (width - cell_len(cell)) for width, cell in zip(widths, line, strict=False)]
        padded = [cell + s if at_left else s + cell for cell, s, at_left in zip(line, spaces, left, strict=False)]
        found.append("-" * (sum(widths) + 2 * len(widths) - 2) if line is rule else "  ".join(padded).rstrip())
    return found


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns of a table whose lines have at most `width` characters; words are broken last."""
    columns = ["\n".join(column) for column in zip(*rows, strict=True)]
    widths = [max(map(cell_len, column.split("\n"))) for column in columns]
    words = [max(map(cell_len, column.split()), default=0) for column in columns]
    while sum(widths) + 2 * len(widths) - 2 > width and max(widths) > 1:
        spare = [wide - word for wide, word in zip(widths, words, strict=True)]
        widest = spare if max(spare) > 0 else widths
        widths[widest.index(max(widest))] -= 1
    return widths


def _folded(words: str, width: int) -> str:
    return "\n".join(line.plain.rstrip() for line in Text(words).wrap(_CONSOLE, width))

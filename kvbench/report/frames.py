"""A DataFrame with title and notes as text (rich), Markdown, LaTeX or HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.errors import UsageError
from kvbench.results.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

NOTE_WIDTH = 100  # characters of a line of notes below a narrow table
_SIGNS = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, **_SIGNS})
_BOX = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


@dataclass(frozen=True)
class Table:
    """A table for people. frame: cells of text. left: left-aligned columns. groups: rows with different values in these
    columns are separated by a line. notes: sentences below the table.
    """

    frame: pd.DataFrame
    title: str = ""
    notes: Sequence[str] = ()
    left: Sequence[str] = ()
    groups: Sequence[str] = ()


def table_of(names: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", left: Sequence[str] = ()) -> Table:
    """A table of rows of text."""
    return Table(frame_of(names, list(zip(*rows, strict=True)) or [[] for _ in names]), title, left=left)


def frame_of(names: Sequence[str], columns: Sequence[Sequence[str]]) -> pd.DataFrame:
    """A DataFrame of text, from its columns."""
    import pandas as pd  # imported here, so that `python -m kvbench --help` starts quickly

    frame = pd.DataFrame({place: list(column) for place, column in enumerate(columns)}, dtype=object)
    return frame.set_axis(list(names), axis="columns")


def text(table: Table, width: int | None = None) -> str:
    """Aligned columns. width: characters of a line, to which rich folds the columns; None: unlimited."""
    frame = table.frame
    shown = RichTable(box=_BOX, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for name in frame.columns:
        longest = max((len(line) for cell in frame[name] for line in cell.split("\n")), default=0)
        heading = _folded(str(name), max([longest, *map(len, str(name).split())]))
        shown.add_column(heading, justify="left" if name in table.left else "right", vertical="bottom")
    keys = [tuple(row) for row in frame[list(table.groups)].to_numpy()]
    for row, key, following in zip(frame.itertuples(index=False), keys, [*keys[1:], *keys[-1:]], strict=True):
        shown.add_row(*map(Text, row), end_section=key != following)
    stream = io.StringIO()
    Console(file=stream, width=width or 10_000, color_system=None, legacy_windows=False).print(shown)
    body = [line.rstrip() for line in stream.getvalue().splitlines()]
    notes_width = min(width or 10_000, max([NOTE_WIDTH, *map(len, body)]))
    title, *notes = (_folded(words, notes_width) for words in (table.title, *table.notes))
    return "\n\n".join(filter(None, [title, "\n".join(body), "\n".join(notes)])) + "\n"


def _folded(words: str, width: int) -> str:
    return "\n".join(line.plain.rstrip() for line in Text(words).wrap(Console(), width))


def markdown(table: Table) -> str:
    """A pipe table."""
    frame = table.frame.map(_escaped).rename(columns=_escaped)
    sides = ["left" if name in table.left else "right" for name in table.frame.columns]
    body = frame.to_markdown(index=False, colalign=sides, disable_numparse=True)
    notes = "\n".join(f"{_escaped(note)}  " for note in table.notes)
    return "\n\n".join(filter(None, [_escaped(table.title), body, notes])) + "\n"


def _escaped(words: object) -> str:
    text = str(words)
    for sign in "\\`*_|<>":
        text = text.replace(sign, f"\\{sign}")
    return text


def latex(table: Table) -> str:
    """A LaTeX table; it needs \\usepackage{booktabs}."""
    sides = "".join("l" if name in table.left else "r" for name in table.frame.columns)
    frame = table.frame.map(_tex).rename(columns=_tex)
    body = frame.to_latex(index=False, escape=False, column_format=sides).rstrip()
    caption = [f"\\caption{{{_tex(table.title)}}}"] if table.title else []
    notes = ["\\par\\smallskip", *(f"{_tex(note)}\\\\" for note in table.notes)] if table.notes else []
    return "\n".join(["\\begin{table}", "\\centering", "\\small", *caption, body, *notes, "\\end{table}"]) + "\n"


def _tex(words: object) -> str:
    """Escapes text for LaTeX. {} before `*` or `[` keeps LaTeX from reading them as options of the row break."""
    escaped = str(words).translate(_LATEX)
    guard = "{}" if escaped.lstrip()[:1] in ("*", "[") else ""
    return guard + re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


def html(table: Table) -> str:
    """One `<table>` with its title and notes, everything escaped."""
    body = table.frame.to_html(index=False, border=0, classes="results", escape=True)
    title = f"<p><b>{escape(table.title)}</b></p>\n" if table.title else ""
    return title + body + "".join(f"\n<p>{escape(note)}</p>" for note in table.notes) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {".txt": text, ".md": markdown, ".tex": latex}


def write(table: Table, path: Path) -> None:
    """Write a table in the format of the path's suffix (one of FORMATS). Raises UsageError if it cannot be written."""
    try:
        write_atomically(path, FORMATS[path.suffix](table))
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written ({error.strerror or error})") from error

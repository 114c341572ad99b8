"""Tables as Markdown, LaTeX and HTML, and files of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.report.table import RIGHT
from kvbench.report.text_table import NONE, TextTable, text
from kvbench.results.files import write_atomically
from kvbench.terminal.command import terminal_width
from kvbench.terminal.outputs import writing

if TYPE_CHECKING:
    import pandas as pd

COLUMN, PAGE, LINES = 52, 108, 44
"""Characters of small text in a column of a paper, and across two; lines of a page below a caption."""

_SIGNS = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, **_SIGNS})


def markdown(table: TextTable) -> str:
    """A pipe table."""
    frame = table.frame.map(_escaped).rename(columns=_escaped)
    sides = ["left" if name in table.left else "right" for name in table.frame.columns]
    body = frame.to_markdown(index=False, colalign=sides, disable_numparse=True)
    notes = "\n".join(f"{_escaped(note)}  " for note in table.notes)
    return "\n\n".join(filter(None, [_escaped(table.title), body, notes])) + "\n"


def _escaped(words: object) -> str:
    """A text without Markdown's syntax: emphasis, code, HTML, formulas, links and images, and cells."""
    return re.sub(r"[\\`*_|<>~$&\[\]]|(?<=\])\(", r"\\\g<0>", str(words))


def latex(table: TextTable, label: str = "results") -> str:
    """A LaTeX table, whose first line names its package.

    A table that is wider than a column of a paper is a table*. One that is wider than a page is broken into several,
    each with the columns of names; one that is longer than a page is several tables. label: of \\label{tab:...}.
    """
    parts = _parts(table)
    kind = "table*" if max(map(_width, parts)) > COLUMN else "table"
    pages: list[list[pd.DataFrame]] = []
    for part in parts:
        if not pages or sum(map(_height, (*pages[-1], part))) > LINES:
            pages.append([])
        pages[-1].append(part)
    name = f"tab:{re.sub(r'[^A-Za-z0-9:-]+', '-', label)}"
    wide = "; two columns wide" * (kind == "table*")
    lines = [f"% \\usepackage{{booktabs}}{wide}"]
    for place, page in enumerate(pages, 1):
        more = f" (part {place} of {len(pages)})" if len(pages) > 1 else ""
        title = [f"\\caption{{{_tex(table.title + more)}}}"] if table.title or more else []
        lines += [f"\\begin{{{kind}}}", "\\centering", "\\small", *title]
        lines += [f"\\label{{{name}{f'-{place}' * (place > 1)}}}"] * bool(title)
        lines.append("\n\\par\\medskip\n".join(_tabular(part, table.left) for part in page))
        if place == len(pages) and table.notes:
            lines += ["\\par\\smallskip", *(f"{_tex(note)}\\\\" for note in table.notes)]
        lines.append(f"\\end{{{kind}}}")
    return "\n".join(lines) + "\n"


def _tabular(frame: pd.DataFrame, left: Sequence[str]) -> str:
    sides = "".join("l" if name in left else "r" for name in frame.columns)
    shown = frame.map(_tex).rename(columns=_tex)
    return str(shown.to_latex(index=False, escape=False, column_format=sides).rstrip())


def _width(frame: pd.DataFrame) -> int:
    """Characters of a line."""
    cells = ([str(name), *frame.iloc[:, place]] for place, name in enumerate(frame.columns))
    return sum(max(map(len, column)) + 3 for column in cells)


def _height(frame: pd.DataFrame) -> int:
    """Lines of a table, with its heading and the space below."""
    return len(frame) + 3


def _parts(table: TextTable) -> list[pd.DataFrame]:
    """Parts of the columns and rows that fit a page. Each begins with the columns of names; empty rows are left out."""
    frame = table.frame
    names = (*table.left, *RIGHT)
    named = next((place for place, name in enumerate(frame.columns) if name not in names), len(frame.columns))
    parts, own = [], [*range(named)]
    for place in range(named, len(frame.columns)):
        if len(own) > named and _width(frame.iloc[:, [*own, place]]) > PAGE:
            parts.append(own)
            own = [*range(named)]
        own = [*own, place]
    found = [frame.iloc[:, part] for part in [*parts, own]]
    if parts:
        found = [part[(part.iloc[:, named:] != NONE).any(axis="columns")] for part in found]
    rows = LINES - 3
    return [part.iloc[first : first + rows] for part in found for first in range(0, max(1, len(part)), rows)]


def renamed(table: TextTable, names: Mapping[str, str], precision: int | None = None) -> TextTable:
    """The table with other names of columns, and of policies and other names in its cells; numbers are rounded."""

    def cell(words: object) -> str:
        text = names.get(str(words), str(words))
        if precision is None:
            return text
        return re.sub(r"\d+\.\d+", lambda found: _rounded(found[0], precision), text)

    frame = table.frame.map(cell).rename(columns=lambda name: names.get(name, name))
    return replace(table, frame=frame, left=[names.get(name, name) for name in table.left],
                   groups=[names.get(name, name) for name in table.groups])  # fmt: skip


def _rounded(number: str, precision: int) -> str:
    decimals = len(number.partition(".")[2])
    return f"{float(number):.{min(decimals, precision)}f}"


def _tex(words: object) -> str:
    """Escapes text for LaTeX. {} before `*` or `[` keeps LaTeX from reading them as options of the row break."""
    escaped = str(words).translate(_LATEX)
    guard = "{}" if escaped.lstrip()[:1] in ("*", "[") else ""
    return guard + re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


def html(table: TextTable) -> str:
    """One `<table>` with its title and notes, everything escaped."""
    body = table.frame.to_html(index=False, border=0, classes="results", escape=True)
    title = f"<p><b>{escape(table.title)}</b></p>\n" if table.title else ""
    return title + body + "".join(f"\n<p>{escape(note)}</p>" for note in table.notes) + "\n"


FORMATS: dict[str, Callable[[TextTable], str]] = {".txt": text, ".md": markdown, ".tex": latex}


def show(table: TextTable, output: Path | None, made: str = "") -> None:
    """Print a table for the terminal, or write it and print its path. made: its contents, such as "9 rows"."""
    if output is None:
        sys.stdout.write(text(table, terminal_width()))
        return
    write(table, output)
    sys.stdout.write(f"{made} -> {output}\n" if made else f"{output}\n")


def write(table: TextTable, path: Path) -> None:
    """Write a table in the format of the path's suffix (one of FORMATS). Raises UsageError if it cannot be written."""
    with writing(path):
        write_atomically(path, latex(table, path.stem) if path.suffix == ".tex" else FORMATS[path.suffix](table))

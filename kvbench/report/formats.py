"""Tables as Markdown, LaTeX and HTML, and files of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UsageError
from kvbench.report.table import Table, text
from kvbench.results.files import write_atomically

if TYPE_CHECKING:
    pass


_SIGNS = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, **_SIGNS})


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

"""A grid as Markdown, LaTeX (booktabs), HTML or CSV. What is bold, underlined or missing is so in all but CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.records.files import write_atomically
from kvbench.report.grid import BEST, COMMAND, HOLE, SECOND, Cell, Grid, heading, spans
from kvbench.report.plain_text import text
from kvbench.terminal.errors import UsageError

_MARKDOWN = {BEST: ("**", "**"), SECOND: ("<u>", "</u>"), "": ("", "")}
_LATEX = {BEST: ("\\textbf{", "}"), SECOND: ("\\underline{", "}"), "": ("", "")}
_HTML = {BEST: ("<b>", "</b>"), SECOND: ("<u>", "</u>"), "": ("", "")}
_LATEX_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    HOLE: "--",
    "×": "$\\times$",
    "−": "$-$",
    "↑": "$\\uparrow$",
    "∞": "$\\infty$",
    "λ": "$\\lambda$",
    "β": "$\\beta$",
    "δ": "$\\delta$",
}

_FILES = PackageLoader("kvbench.report", ".")
_TRIMMED: dict[str, Any] = {"loader": _FILES, "trim_blocks": True, "undefined": StrictUndefined}
_WEB = Environment(autoescape=True, keep_trailing_newline=True, **_TRIMMED)
_TEX = Environment(
    autoescape=False,
    keep_trailing_newline=True,
    block_start_string="<%",
    block_end_string="%>",
    variable_start_string="<<",
    variable_end_string=">>",
    comment_start_string="<#",
    comment_end_string="#>",
    **_TRIMMED,
)


def markdown(grid: Grid) -> str:
    """A pipe table; block titles are rows of their own."""
    width = len(grid.header) + 1
    head = [
        _md(grid.corner),
        *(_markdown_cell(Cell(t, notes=grid.notes_of(i))) for i, t in enumerate(grid.flat_header)),
    ]
    above = ": ".join(filter(None, (grid.name and f"**{_md(grid.name)}**", _md(grid.title))))
    lines = [
        *([above, ""] if above else []),
        _pipes(head),
        "|---|" + "".join("---|" if i in grid.left else "---:|" for i in range(width - 1)),
    ]
    for block in grid.blocks:
        lines += [_pipes([f"**{_md(block.title)}**", *[""] * (width - 1)])] if block.title else []
        for row in block.rows:
            lines.append(_pipes([_markdown_cell(cell) for cell in (row.head, *row.cells)]))
    notes = [f"<sup>{a}</sup> {_md_note(sentence)}" if a else _md(sentence) for a, sentence in grid.notes]
    return "\n".join([*lines, "", *(f"{note}  " for note in notes)]).rstrip() + "\n"


def _md(words: str) -> str:
    return escape(words, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def _md_note(words: str) -> str:
    """Commands are shown as code, so that they can be copied."""
    return f"`{words}`" if words.startswith(COMMAND) else _md(words)


def _markdown_cell(cell: Cell) -> str:
    before, after = _MARKDOWN[cell.mark]
    notes = f"<sup>{','.join(cell.notes)}</sup>" if cell.notes else ""
    return f"{before}{HOLE if cell.hole else _md(cell.text.strip())}{after}{notes}"


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def latex(grid: Grid) -> str:
    """A table of booktabs' rules, best in bold, second best underlined; it needs \\usepackage{booktabs}."""
    return _filled(_TEX, "table.tex", grid, _tex_cell)


def _filled(environment: Environment, template: str, grid: Grid, cell: Callable[[Cell], str]) -> str:
    levels = [spans(grid, level) for level in range(len(grid.header[0]))]
    about = {"grid": grid, "heading": heading(grid), "levels": levels, "command": COMMAND}
    return environment.get_template(template).render(**about, cell=cell, tex=_tex)


def _tex(words: str) -> str:
    """The words as LaTeX sets them; {} before a `*` or `[`, which the end of the row above would take as its own."""
    guard = "{}" if words.lstrip()[:1] in ("*", "[") else ""
    return guard + "".join(_LATEX_SPECIAL.get(character, character) for character in words)


def _tex_cell(cell: Cell) -> str:
    before, after = _LATEX[cell.mark]
    words = _tex(HOLE) if cell.hole else _tex_numbers(_tex(cell.text.strip()))
    return f"{before}{words}{after}{_tex_notes(cell.notes)}"


def _tex_numbers(words: str) -> str:
    """A minus before a number is one, and an interval is joined as one: `-0.90 (-0.97..-0.59)`, `0.68-1.00`."""
    joined = re.sub(r"(?<=\.\d\d)-(?=\d)", "--", words.replace("..", " to "))
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", joined)


def _tex_notes(letters: Sequence[str]) -> str:
    return f"\\textsuperscript{{{','.join(letters)}}}" if letters else ""


def html(grid: Grid) -> str:
    """One `<table>` with its caption and notes, everything escaped; the page around it is the caller's."""
    return _filled(_WEB, "table.html", grid, _html_cell)


def page(*grids: Grid) -> str:
    """A file of its own around the tables of `html`."""
    return _WEB.get_template("tables.html").render(title=grids[0].name or grids[0].title, tables=map(html, grids))


def _html_cell(cell: Cell) -> Markup:
    before, after = _HTML[cell.mark]
    notes = f"<sup>{escape(','.join(cell.notes))}</sup>" if cell.notes else ""
    return Markup(f"{before}{HOLE if cell.hole else escape(cell.text)}{after}{notes}")


def comma_separated(grid: Grid) -> str:
    """The digits alone, one line a row: block, label, then the cells; holes are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["block", grid.corner, *grid.flat_header])
    for block in grid.blocks:
        for row in block.rows:
            writer.writerow([block.title, row.label, *("" if cell.hole else cell.text for cell in row.cells)])
    return file.getvalue()


FORMATS: dict[str, Callable[[Grid], str]] = {
    ".txt": text,
    ".md": markdown,
    ".tex": latex,
    ".html": page,
    ".csv": comma_separated,
}


def write(grid: Grid, path: Path) -> None:
    """Write a grid in the format that the suffix of `path` says. Raises UsageError for another or where it cannot."""
    check_suffix(path)
    save(FORMATS[path.suffix](grid), path)


def save(words: str, path: Path) -> None:
    """Write a file. Raises UsageError where it cannot."""
    try:
        write_atomically(path, words)
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written ({error.strerror or error})") from error


def check_suffix(path: Path) -> None:
    """Raise UsageError where the suffix of `path` is that of no format."""
    if path.suffix not in FORMATS:
        raise UsageError(f"-o {path} must end in one of {', '.join(FORMATS)}")

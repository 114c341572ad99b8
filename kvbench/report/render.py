"""A grid as Markdown, LaTeX (booktabs), HTML or CSV. What is bold, underlined or missing is so in all but CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kvbench.report.grid import BEST, COMMAND, HOLE, SECOND, Block, Cell, Grid, heading, spans
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


_STYLE = """body { font: 14px/1.4 system-ui, sans-serif; margin: 2rem; color: #222; overflow-x: auto }
table { border-collapse: collapse; border-top: 2px solid; border-bottom: 2px solid; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .6rem; font-weight: 600 }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap; font-weight: normal }
tr > th:first-child, td.left { text-align: left }
thead { border-bottom: 1px solid }
thead th[colspan] { text-align: center; border-bottom: 1px solid #999 }
tbody th[colspan] { text-align: center; font-style: italic; border-top: 1px solid; border-bottom: 1px solid #999 }
sup { color: #666 }
p { margin: .2rem 0; color: #444; max-width: 60rem }
"""


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
            label = _markdown_cell(Cell(row.label, notes=row.notes))
            lines.append(_pipes([label, *(_markdown_cell(cell) for cell in row.cells)]))
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
    width = len(grid.header) + 1
    lines = ["\\begin{table}", "\\centering", "\\small", *([f"\\caption{{{_tex(grid.title)}}}"] if grid.title else [])]
    lines += [f"\\begin{{tabular}}{{l{_latex_columns(grid)}}}", "\\toprule", *_latex_header(grid)]
    for block in grid.blocks:
        lines.append("\\midrule")
        lines += [f"\\multicolumn{{{width}}}{{c}}{{{_tex(block.title)}}} \\\\", "\\midrule"] if block.title else []
        lines += [_ampersands([_tex_cell(Cell(r.label, notes=r.notes)), *map(_tex_cell, r.cells)]) for r in block.rows]
    lines += ["\\bottomrule", "\\end{tabular}", *(["\\par\\smallskip"] if grid.notes else [])]
    lines += [f"{_tex_notes((a,)) if a else ''}{_tex_note(sentence)}\\\\" for a, sentence in grid.notes]
    return "\n".join([*lines, "\\end{table}"]) + "\n"


def _latex_columns(grid: Grid) -> str:
    return "".join("l" if i in grid.left else "r" for i in range(len(grid.header)))


def _latex_header(grid: Grid) -> list[str]:
    lines = []
    for level in range(len(grid.header[0])):
        inner = level == len(grid.header[0]) - 1
        cells, rules = [_tex(grid.corner) if inner else ""], []
        for labels, span, start in spans(grid, level):
            label = _tex_cell(Cell(labels, notes=grid.notes_of(start) if inner else ()))
            cells.append(label if inner else f"\\multicolumn{{{span}}}{{c}}{{{label}}}")
            rules += [f"\\cmidrule(lr){{{start + 2}-{start + 1 + span}}}"] if labels and not inner else []
        lines += [_ampersands(cells), *([" ".join(rules)] if rules else [])]
    return lines


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


def _tex_note(words: str) -> str:
    return f"\\texttt{{{_tex(words)}}}" if words.startswith(COMMAND) else _tex(words)


def _ampersands(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def html(grid: Grid) -> str:
    """One `<table>` with its caption and notes, everything escaped; the page around it is the caller's."""
    width = len(grid.header) + 1
    lines = ['<table class="published">', f"<caption>{escape(heading(grid))}</caption>", "<thead>"]
    for level in range(len(grid.header[0])):
        inner = level == len(grid.header[0]) - 1
        cells = [f"<th>{escape(grid.corner) if inner else ''}</th>"]
        for label, span, start in spans(grid, level):
            inside = _html_cell(Cell(label, notes=grid.notes_of(start) if inner else ()))
            cells.append(f'<th colspan="{span}">{inside}</th>' if span > 1 else f"<th>{inside}</th>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = [line for block in grid.blocks for line in _html_block(block, width, grid.left)]
    lines += ["</thead>", *body, "</table>"]
    lines += [f"<p>{f'<sup>{escape(a)}</sup> ' if a else ''}{_html_note(sentence)}</p>" for a, sentence in grid.notes]
    return "\n".join(lines) + "\n"


def _html_note(words: str) -> str:
    return f"<code>{escape(words)}</code>" if words.startswith(COMMAND) else escape(words)


def page(*grids: Grid) -> str:
    """A file of its own around the tables of `html`."""
    title = escape(grids[0].name or grids[0].title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n{''.join(map(html, grids))}</body>\n</html>\n"
    )


def _html_block(block: Block, width: int, left: Sequence[int]) -> list[str]:
    lines = ["<tbody>"]
    lines += [f'<tr><th colspan="{width}">{escape(block.title)}</th></tr>'] if block.title else []
    for row in block.rows:
        starts = ('<td class="left">' if i in left else "<td>" for i in range(width))
        cells = "".join(f"{start}{_html_cell(cell)}</td>" for start, cell in zip(starts, row.cells, strict=False))
        lines.append(f"<tr><th>{_html_cell(Cell(row.label, notes=row.notes))}</th>{cells}</tr>")
    return [*lines, "</tbody>"]


def _html_cell(cell: Cell) -> str:
    before, after = _HTML[cell.mark]
    notes = f"<sup>{escape(','.join(cell.notes))}</sup>" if cell.notes else ""
    return f"{before}{HOLE if cell.hole else escape(cell.text)}{after}{notes}"


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
        path.write_text(words, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written ({error.strerror or error})") from error


def check_suffix(path: Path) -> None:
    """Raise UsageError where the suffix of `path` is that of no format."""
    if path.suffix not in FORMATS:
        raise UsageError(f"-o {path} must end in one of {', '.join(FORMATS)}")

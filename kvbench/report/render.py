"""A grid as text, Markdown, LaTeX (booktabs), HTML or CSV. What is bold, underlined or missing is so in all but CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path

from kvbench.report.grid import BEST, SECOND, Block, Cell, Grid, Row
from kvbench.terminal.errors import UsageError

HOLE = "–"
_GAP = "  "
NOTE_WIDTH, MOST_WIDTH = 100, 120  # letters of a line of notes: of a narrow table, of a wide one
FOLDED = 20  # letters of a column that is folded, at least
COMMAND = "python -m "  # notes that begin so are commands
_TEXT = {BEST: "*", SECOND: "+", "": ""}
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


def heading(grid: Grid) -> str:
    """What stands above a table: its name, where it has one, and its title."""
    return ": ".join(filter(None, (grid.name, grid.title)))


def text(grid: Grid, width: int | None = None) -> str:
    """Aligned columns; best `*`, second best `+`, footnotes `[a]`.

    width: letters a line may have; columns beyond it stand in a second table below, and so on, each with its labels.
    """
    parts = [grid] if width is None else _folded_columns(grid, width)
    room = width or NOTE_WIDTH
    bodies = ["\n".join(line.rstrip() for line in _text_body(part, _widths(part, room))) for part in parts]
    table = min(MOST_WIDTH, max(len(line) for body in bodies for line in body.split("\n")))
    notes = _text_notes(grid, min(width or MOST_WIDTH, max(NOTE_WIDTH, table)))
    head = heading(grid) if width is None else _folded("", heading(grid), width)
    return "\n\n".join(filter(None, [head, *bodies, "\n".join(notes)])) + "\n"


def _text_body(grid: Grid, widths: list[int]) -> Iterator[str]:
    yield from (_text_level(grid, widths, level) for level in range(len(grid.header[0]) - 1))
    yield _aligned(grid, [grid.corner, *_text_header(grid)], widths)
    yield "-" * _wide(widths)
    for block in grid.blocks:
        if block.title:
            yield f"{block.title}:"
        for row in block.rows:
            yield from _text_lines(grid, _text_row(row), widths)


def _text_header(grid: Grid) -> list[str]:
    return [_text_cell(Cell(labels[-1], notes=grid.notes_of(i))) for i, labels in enumerate(grid.header)]


def _widths(grid: Grid, room: int) -> list[int]:
    rows = [_text_row(row) for block in grid.blocks for row in block.rows]
    widths = [max(map(len, column)) for column in zip([grid.corner, *_text_header(grid)], *rows, strict=True)]
    _narrow(grid, widths, room)
    _widen(grid, widths)
    return widths


def _wide(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _folded_columns(grid: Grid, width: int) -> list[Grid]:
    """The grid as several of neighbouring columns, none wider than `width` unless a single column is."""
    widths, keys = _widths(grid, width), list(range(grid.keys))
    parts: list[list[int]] = []
    for column in range(grid.keys, len(grid.header)):
        longer = [*(parts[-1] if parts else keys), column]
        if not parts or _wide([widths[0], *(widths[i + 1] for i in longer)]) > width:
            parts.append([*keys, column])
        else:
            parts[-1] = longer
    return [_of_columns(grid, columns) for columns in parts]


def _of_columns(grid: Grid, columns: Sequence[int]) -> Grid:
    """The grid with some of its columns."""
    blocks = [
        replace(block, rows=tuple(replace(row, cells=tuple(row.cells[i] for i in columns)) for row in block.rows))
        for block in grid.blocks
    ]
    return replace(
        grid,
        header=tuple(grid.header[i] for i in columns),
        blocks=tuple(blocks),
        column_notes=tuple(grid.column_notes[i] for i in columns) if grid.column_notes else (),
        left=tuple(place for place, i in enumerate(columns) if i in grid.left),
    )


def _narrow(grid: Grid, widths: list[int], room: int) -> None:
    """Leave a last column of words what there is room for beside the others: it is folded."""
    last = len(widths) - 1
    if last - 1 in grid.left:
        widths[last] = min(widths[last], max(FOLDED, room - sum(widths[:last]) - len(_GAP) * last))


def _text_lines(grid: Grid, row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row, over several lines where its last cell is longer than its column."""
    too_long = any(len(word) > widths[-1] for word in row[-1].split())
    first, *more = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=too_long) or [""]
    empty = [""] * (len(row) - 1)
    return [_aligned(grid, [*row[:-1], first], widths), *(_aligned(grid, [*empty, words], widths) for words in more)]


def _widen(grid: Grid, widths: list[int]) -> None:
    """Make the first of the columns under a heading wider where the heading is wider than all of them."""
    for level in range(len(grid.header[0]) - 1):
        for words, span, start in _spans(grid, level):
            widths[start + 1] += max(0, len(words) + 2 - _span_width(widths, span, start))


def _span_width(widths: Sequence[int], span: int, start: int) -> int:
    return _wide(widths[start + 1 : start + 1 + span])


def _text_level(grid: Grid, widths: Sequence[int], level: int) -> str:
    heads = []
    for words, span, start in _spans(grid, level):
        heads.append((f" {words} " if words else "").center(_span_width(widths, span, start), "-" if words else " "))
    return _GAP.join([" " * widths[0], *heads]).rstrip()


def _text_row(row: Row) -> list[str]:
    return [_text_cell(Cell(row.label, notes=row.notes)), *(_text_cell(cell) for cell in row.cells)]


def _text_cell(cell: Cell) -> str:
    notes = f"[{','.join(cell.notes)}]" if cell.notes else ""
    return f"{HOLE if cell.hole else cell.text}{_TEXT[cell.mark]}{notes}"


def _aligned(grid: Grid, row: Sequence[str], widths: Sequence[int]) -> str:
    left = {0, *(column + 1 for column in grid.left)}
    words = enumerate(zip(row, widths, strict=True))
    return _GAP.join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in words).rstrip()


def _text_notes(grid: Grid, wide: int) -> list[str]:
    """Sentences are folded, commands are not: they are to be copied."""
    notes = [(f"[{letter}] " if letter else "", sentence) for letter, sentence in grid.notes]
    return [mark + said if said.startswith(COMMAND) else _folded(mark, said, wide) for mark, said in notes]


def _folded(mark: str, said: str, wide: int) -> str:
    indent = " " * len(mark)
    return textwrap.fill(
        said, wide, initial_indent=mark, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
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
        for labels, span, start in _spans(grid, level):
            label = _tex_cell(Cell(labels, notes=grid.notes_of(start) if inner else ()))
            cells.append(label if inner else f"\\multicolumn{{{span}}}{{c}}{{{label}}}")
            rules += [f"\\cmidrule(lr){{{start + 2}-{start + 1 + span}}}"] if labels and not inner else []
        lines += [_ampersands(cells), *([" ".join(rules)] if rules else [])]
    return lines


def _spans(grid: Grid, level: int) -> list[tuple[str, int, int]]:
    """(label, columns it spans, first of them); the innermost level spans one each."""
    if level == len(grid.header[0]) - 1:
        return [(labels[level], 1, i) for i, labels in enumerate(grid.header)]
    spans, start = [], 0
    for key, group in groupby(grid.header, key=lambda labels: labels[: level + 1]):
        count = len(list(group))
        spans.append((key[level], count, start))
        start += count
    return spans


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
        for label, span, start in _spans(grid, level):
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

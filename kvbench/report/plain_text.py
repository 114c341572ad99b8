"""A grid as aligned text: labels are folded where a table is too wide, then columns stand in a second table below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.report.grid import BEST, COMMAND, HOLE, SECOND, Cell, Grid, Row, heading, spans

_GAP = "  "
NOTE_WIDTH, MOST_WIDTH = 100, 120  # letters of a line of notes: of a narrow table, of a wide one
FOLDED = 20  # letters of a column that is folded, at least
_TEXT = {BEST: "*", SECOND: "+", "": ""}


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
    yield from _header_lines(grid, widths)
    yield "-" * _wide(widths)
    for block in grid.blocks:
        if block.title:
            yield f"{block.title}:"
        for row in block.rows:
            yield from _text_lines(grid, _text_row(row), widths)


def _header_lines(grid: Grid, widths: Sequence[int]) -> Iterator[str]:
    """The innermost labels, over several lines where one is longer than its column."""
    titles = [grid.corner, *_text_header(grid)]
    folded = [_words_in(title, width) for title, width in zip(titles, widths, strict=True)]
    height = max(map(len, folded))
    for line in zip(*([""] * (height - len(lines)) + lines for lines in folded), strict=True):
        yield _aligned(grid, line, widths)


def _words_in(title: str, width: int) -> list[str]:
    return textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False) or [""]


def _text_header(grid: Grid) -> list[str]:
    return [_text_cell(head) for head, _, _ in spans(grid, len(grid.header[0]) - 1)]


def _widths(grid: Grid, room: int) -> list[int]:
    """Letters of every column. Labels are folded where the table would be wider than `room`."""
    rows = [_text_row(row) for block in grid.blocks for row in block.rows]
    titles = [grid.corner, *_text_header(grid)]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    if _wide(widths) > room:
        longest = [max(map(len, title.split()), default=0) for title in titles]
        widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)] or [0] * len(titles)
        widths = [max(pair) for pair in zip(widths, longest, strict=True)]
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
        for head, span, start in spans(grid, level):
            widths[start + 1] += max(0, len(head.text) + 2 - _span_width(widths, span, start))


def _span_width(widths: Sequence[int], span: int, start: int) -> int:
    return _wide(widths[start + 1 : start + 1 + span])


def _text_level(grid: Grid, widths: Sequence[int], level: int) -> str:
    heads = []
    for head, span, start in spans(grid, level):
        words = head.text
        heads.append((f" {words} " if words else "").center(_span_width(widths, span, start), "-" if words else " "))
    return _GAP.join([" " * widths[0], *heads]).rstrip()


def _text_row(row: Row) -> list[str]:
    return [_text_cell(row.head), *(_text_cell(cell) for cell in row.cells)]


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

"""Published numbers beside ours, of every table about which some of the runs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.analysis.result import Result
from kvbench.papers import arrangement
from kvbench.papers.compare import HEADER, compare
from kvbench.report.grid import COMMAND, Block, Grid, Row
from kvbench.report.render import html

OURS, TO_DO = HEADER.index("ours"), HEADER.index("to do")


def beside_print(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """(name, HTML) of every table with a number that the runs measured; rows without one are left out, and counted."""
    models = {run.model for run in runs}
    known = {paper_name for paper_name, own in arrangement.names().models.items() if own in models}
    found = []
    for name in arrangement.tables():
        if known.isdisjoint(number.model for number in arrangement.numbers(name)):
            continue
        grid = compare(name, runs)
        measured = _measured(grid)
        if measured is not None:
            found.append((name, html(measured)))
    return found


def _measured(grid: Grid) -> Grid | None:
    """The rows that have a number of ours, and the notes that still are about one; None without any."""
    kept = [Block(block.title, rows) for block in grid.blocks if (rows := tuple(_rows(block)))]
    if not kept:
        return None
    used = {letter for block in kept for row in block.rows for letter in row.notes}
    notes = [(mark, said) for mark, said in grid.notes if not said.startswith(COMMAND) and (not mark or mark in used)]
    return replace(grid, blocks=tuple(kept), header=grid.header[:TO_DO], notes=tuple(notes))


def _rows(block: Block) -> Iterator[Row]:
    """The rows that have a number of ours."""
    for row in block.rows:
        if not row.cells[OURS].hole:
            yield replace(row, cells=row.cells[:TO_DO])

"""Running many cells: the one way in for a single cell, a sweep, and each share of a sweep on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.runs.cell import Cell
from kvbench.runs.runner import run
from kvbench.runs.watch import Nobody, Watch


@dataclass(frozen=True)
class Ending:
    """What became of a cell: the folder of its results, or the error that kept it from being complete."""

    cell: Cell
    folder: Path | None = None
    error: Exception | None = None


def run_cells(cells: Sequence[Cell], watch: Watch | None = None) -> list[Ending]:
    """Compute what is missing of all cells; an error ends its own cell only. Endings in the order of the cells."""
    watch = Nobody() if watch is None else watch
    endings = []
    for cell in cells:
        try:
            ending = Ending(cell, run(cell, watch))
        except Exception as error:
            ending = Ending(cell, error=error)
        watch.ended(cell, ending.error)
        endings.append(ending)
    return endings

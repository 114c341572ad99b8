"""Running one cell: a sweep of one."""

from __future__ import annotations

from pathlib import Path

from kvbench.engine.prompts import make_prompts
from kvbench.engine.run import run_cells
from kvbench.engine.watch import Watch
from kvbench.identity.cell import Cell

__all__ = ["make_prompts", "run"]


def run(cell: Cell, watch: Watch | None = None) -> Path:
    """Compute what is missing of a cell's examples and return the folder that holds its results.

    A run that is complete is left as it is, without loading the model. Raises UsageError where the configuration asks
    for what cannot be, RunBusyError where another process computes the same run, RunLostError where its file vanishes
    meanwhile, OSError where the disk is full.
    """
    (ending,) = run_cells([cell], watch)
    if ending.error is not None:
        raise ending.error
    assert ending.folder is not None
    return ending.folder

"""`python -m kvbench.tables run`: the runs behind what is asked of a table, and then the table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvbench.papers.cells import build, overrides
from kvbench.papers.choice import POCKET, Choice, check_table
from kvbench.papers.compare import compare
from kvbench.papers.grid import Grid
from kvbench.papers.pocket_table import pocket_runs, pocket_table
from kvbench.papers.protocol import Plan, command, runs_of
from kvbench.report.records import RunRecord, find_runs
from kvbench.runs.cell import Cell
from kvbench.runs.engine import Ending, run_cells
from kvbench.runs.watch import Nobody
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)
OUT = "results/runs"


def planned(name: str, choice: Choice) -> list[Plan]:
    """The runs behind what is asked of a table, each once. Raises UsageError where there are none."""
    check_table(name)
    if choice.scale == POCKET:
        return pocket_runs(name, choice)
    found = {tuple(command([plan])): plan for number in choice.numbers(name) for plan in runs_of(number)}
    if not found:
        raise UsageError(f"nothing of what is asked of {name} can be run: `compare {name}` says why")
    return list(found.values())


def command_lines(name: str, choice: Choice) -> list[list[str]]:
    """The same runs as arguments of `python -m kvbench`, one list each: what can be handed to another machine."""
    return [overrides(plan, {"out": OUT, **choice.run}) for plan in planned(name, choice)]


def run_table(name: str, choice: Choice) -> list[Ending]:
    """Compute what is missing of the runs behind a table. Raises UsageError where not one of them can be made.

    Those that cannot be made, while others can, are told of: each reason once.
    """
    cells: list[Cell] = []
    refused: dict[str, int] = {}
    plans = planned(name, choice)
    for plan in plans:
        try:
            cells.append(build(plan, {"out": OUT, **choice.run}))
        except UsageError as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
    if not cells:
        raise UsageError("; ".join(refused))
    for sentence, count in refused.items():
        log.error("%d of %d runs are left out: %s", count, len(plans), sentence)
    log.info("%s: %d runs", name, len(cells))
    return run_cells(cells, _Counted(len(cells)))


class _Counted(Nobody):
    """Says how many runs are done, and at once what kept one from being complete."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def ended(self, cell: Cell, error: Exception | None) -> None:
        self.done += 1
        if error is None:
            log.info("%d of %d: %s", self.done, self.total, cell.run_id)
        else:
            log.error("%s: %s", cell.run_id, str(error) or type(error).__name__)


def table(name: str, choice: Choice, runs: Sequence[RunRecord]) -> Grid:
    """What is asked of a table: on the pocket model its own numbers, else ours beside the print."""
    return pocket_table(name, choice, runs) if choice.scale == POCKET else compare(name, runs, choice)


def finished(choice: Choice) -> list[RunRecord]:
    """The finished runs in the folder that the runs of a table go to."""
    return find_runs(Path(choice.run.get("out", OUT)))

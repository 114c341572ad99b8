"""Computing planned cells in this process, beside others that may work on the same folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell
from kvbench.records.locks import Owner, holder
from kvbench.sweeps.outcome import Outcome, explain
from kvbench.sweeps.plan import Planned
from kvbench.sweeps.recorder import Recorder
from kvbench.terminal.command import say

POLL_SECONDS = 1.0


def compute(planned: Sequence[Planned], recorder: Recorder, *, waits: bool) -> list[Outcome]:
    """Compute what is missing of all cells that can be computed, and return what became of each, in order.

    A cell that another process computes is left to it. waits: until that one has ended, to show its results too.
    """
    cells = {p.cell.place: p.cell for p in planned if p.cell is not None}
    run_cells(list(cells.values()), recorder)
    _take_over(cells, recorder, waits)
    entries = {p.cell.place: p.entry for p in planned if p.cell is not None}
    for place, error in recorder.busy.items():
        code, sentence = explain(error)
        entry = entries[place]
        recorder.outcomes[entry.key] = Outcome(entry.title, entry.limit, None, sentence, code)
        recorder.tell(recorder.outcomes[entry.key])
    recorder.told.rest()
    return outcomes(planned, recorder)


def _take_over(cells: Mapping[Path, Cell], recorder: Recorder, waits: bool) -> None:
    """Compute those of the cells that others had, by their places, once nobody has them any more."""
    told = False
    while recorder.busy:
        owners = {place: holder(error.folder) for place, error in recorder.busy.items()}
        free = [cells[place] for place, owner in owners.items() if owner is None]
        if not free and not waits:
            return
        if not free and not told:
            told = True
            say(_waiting([owner for owner in owners.values() if owner is not None]))
        time.sleep(POLL_SECONDS)
        if free:
            run_cells(free, recorder)


def outcomes(planned: Sequence[Planned], recorder: Recorder) -> list[Outcome]:
    """What became of the cells so far, in the order of the sweep; those that never began are left out."""
    found = []
    for p in planned:
        if p.entry.error is not None:
            found.append(Outcome(p.entry.title, error=p.entry.error, code=p.entry.code))
        elif p.entry.key in recorder.outcomes:
            found.append(recorder.outcomes[p.entry.key])
    return found


def _waiting(owners: Sequence[Owner]) -> str:
    many = f"{len(owners)} cells are" if len(owners) > 1 else "1 cell is"
    return f"{many} being computed by {', '.join(sorted(set(map(str, owners))))}: waiting for it"

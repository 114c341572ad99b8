"""What a sweep writes down of its cells while they are computed, so that another process can follow it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.report.trackers.watching import SweepWatch
from kvbench.runs.cell import Cell
from kvbench.runs.cell_state import CellState, finished_examples, read_state, write_state
from kvbench.runs.claims import RunBusyError
from kvbench.runs.definition import Entry
from kvbench.runs.sample import Sample
from kvbench.sweeps.outcome import FAILED, Outcome, explain, say
from kvbench.sweeps.plan import Planned
from kvbench.sweeps.states import broken

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where the states of a sweep's cells go, and the log that tells more of them."""

    out: Path
    log: str | None = None


class Recorder:
    """A `Watch` that keeps the outcome of every cell, tells errors at once, and writes states where a sweep has them.

    place: None for a lone cell, of which nothing but its results is kept. tracker: told the same.
    """

    def __init__(self, planned: Sequence[Planned], place: Place | None, tracker: SweepWatch) -> None:
        self._tracker = tracker
        self.outcomes: dict[str, Outcome] = {}
        self.busy: dict[str, RunBusyError] = {}
        self._planned: Mapping[str, Planned] = {p.entry.key: p for p in planned}
        self._place = place
        self._begun: dict[str, float] = {}
        self._stop = False
        self.written = 0  # examples that were finished here

    def stop_soon(self) -> None:
        """End everything as soon as the example that is computed now is on disk."""
        self._stop = True

    def started(self, cell: Cell, done: Sequence[Sample]) -> None:
        """Examples of a cell will be computed; `done` are those that lie on disk already."""
        self._tracker.started(cell, done)
        self._begun[cell.run_id] = time.time()
        self._write(cell, CellState("running", cell.limit, len(done), time.time()))

    def finished(self, cell: Cell, sample: Sample) -> None:
        """One more example of a cell is on disk."""
        self._tracker.finished(cell, sample)
        self.written += 1
        if self._stop:
            self._stop = False  # the others' samples that wait are written while they close
            raise KeyboardInterrupt

    def ended(self, cell: Cell, error: Exception | None) -> None:
        """A cell is complete, or went no further because of `error`."""
        self.busy.pop(cell.run_id, None)
        if isinstance(error, RunBusyError):
            self.busy[cell.run_id] = error
            return
        self._tracker.ended(cell, error)
        planned = self._planned[cell.run_id]
        outcome = self._complete(planned, cell) if error is None else self._failed(planned, cell, error)
        self.outcomes[cell.run_id] = outcome

    def never_began(self, entry: Entry, sentence: str, code: int) -> None:
        """A cell cannot be computed here."""
        outcome = Outcome(entry.title, entry.limit, None, sentence, code)
        self.outcomes[entry.key] = outcome
        self.tell(outcome)
        now = time.time()
        self._keep(entry.key, CellState("failed", entry.limit, 0, now, now, sentence, code))

    def tell(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Say what went wrong with a cell; which one, where there are several."""
        alone = self._place is None
        say(str(outcome.error) if alone else f"{outcome.title}: {outcome.error}", error)

    def _complete(self, planned: Planned, cell: Cell) -> Outcome:
        broke = broken(cell.folder)
        outcome = Outcome(planned.entry.title, cell.limit, cell.folder, broke, FAILED if broke else 0)
        if broke:
            self.tell(outcome)
        n = finished_examples(cell.out, cell.run_id) or 0
        self._write(cell, self._ended("finished", cell, n, outcome))
        return outcome

    def _failed(self, planned: Planned, cell: Cell, error: Exception) -> Outcome:
        code, sentence = explain(error)
        outcome = Outcome(planned.entry.title, cell.limit, None, sentence, code)
        self.tell(outcome, error if planned.entry.config["debug"] is True else None)
        self._write(cell, self._ended("failed", cell, 0, outcome))
        return outcome

    def _ended(self, state: str, cell: Cell, done: int, outcome: Outcome) -> CellState:
        now = time.time()
        since = self._begun.get(cell.run_id, now)
        return CellState(state, cell.limit, done, since, now, outcome.error, outcome.code)

    def _write(self, cell: Cell, state: CellState) -> None:
        if self._place is None:
            return
        before = read_state(cell.out, cell.run_id)
        if cell.run_id not in self._begun and before is not None and before.state == state.state == "finished":
            state = replace(before, limit=state.limit, done=state.done)  # found complete: who computed it stays
        self._keep(cell.run_id, state)

    def _keep(self, run_id: str, state: CellState) -> None:
        if self._place is None:
            return
        state = replace(state, host=socket.gethostname(), pid=os.getpid(), log=self._place.log)
        try:
            write_state(self._place.out, run_id, state)
        except OSError as error:  # the samples are the truth, this is for those who watch
            log.warning("%s: its state cannot be written (%s)", run_id, error.strerror)

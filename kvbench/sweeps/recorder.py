"""What a sweep writes down of its cells while they are computed, so that another process can follow it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.identity.cell import Cell
from kvbench.records.cell_state import (
    CellState,
    examples,
    failure,
    read_states,
    shard_state_path,
    state_path,
    write_state,
)
from kvbench.records.definition import Entry
from kvbench.records.locks import RunBusyError, RunLostError
from kvbench.records.sample import Sample
from kvbench.report.trackers.watching import SweepWatch
from kvbench.sweeps.outcome import Outcome, Told, explain
from kvbench.sweeps.plan import Planned
from kvbench.sweeps.states import broken
from kvbench.terminal.command import FAILED, say
from kvbench.terminal.errors import UsageError

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
        self.told = Told()
        self.busy: dict[Path, RunBusyError] = {}  # by the places that are not ours to write to
        self._planned: Mapping[str, Planned] = {p.entry.key: p for p in planned}
        self._place = place
        self._totals: dict[Path, int] = {}
        self._stop = False
        self.written = 0  # examples that were finished here

    def stop_soon(self) -> None:
        """End everything as soon as the example that is computed now is on disk."""
        self._stop = True

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        """Examples of a cell will be computed, `total` of them with those that lie on disk already, `done`."""
        if cell.shard is None:  # what a tracker hears of is the run: told once, by whoever puts it together
            self._tracker.started(cell, done, total)
        elif failure(read_states(cell.out, cell.run_id)) is not None:  # of an earlier launch: it is tried again
            state_path(cell.out, cell.run_id).unlink(missing_ok=True)
        self._totals[cell.place] = total
        self._write(cell, CellState(cell.limit, len(done), time.time(), total))

    def finished(self, cell: Cell, sample: Sample) -> None:
        """One more example of a cell is on disk."""
        if cell.shard is None:
            self._tracker.finished(cell, sample)
        self.written += 1
        if self._stop:
            self._stop = False  # the others' samples that wait are written while they close
            raise KeyboardInterrupt

    def ended(self, cell: Cell, error: Exception | None) -> None:
        """A cell is complete, or went no further because of `error`."""
        self.busy.pop(cell.place, None)
        if isinstance(error, RunBusyError):
            self.busy[cell.place] = error
            return
        if cell.shard is None:
            self._tracker.ended(cell, error)
        planned = self._planned[cell.run_id]
        if error is not None:
            self.outcomes[cell.run_id] = self._failed(planned, cell, error)
        elif cell.shard is None:
            self.outcomes[cell.run_id] = self._complete(planned, cell)
        elif self._logs:
            say(f"{planned.entry.title}: shard {cell.shard} is on disk")

    def never_began(self, entry: Entry, sentence: str, code: int) -> None:
        """A cell cannot be computed here."""
        outcome = Outcome(entry.title, entry.limit, None, sentence, code)
        self.outcomes[entry.key] = outcome
        self.tell(outcome)
        if self._place is not None:
            state = CellState(entry.limit, 0, time.time(), None, sentence, code)
            self._keep(state_path(self._place.out, entry.key), state)

    def tell(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Say what went wrong with a cell; which one, where there are several."""
        if self._place is None:
            say(str(outcome.error), error)
        else:
            self.told.tell(outcome.title, str(outcome.error), error)

    def _complete(self, planned: Planned, cell: Cell) -> Outcome:
        broke = broken(cell.folder)
        outcome = Outcome(planned.entry.title, cell.limit, cell.folder, broke, FAILED if broke else 0)
        if broke:
            self.tell(outcome)
        elif self._logs:
            say(f"{planned.entry.title}: finished, see {cell.folder}")
        n, _ = examples(cell.folder)
        self._write(cell, CellState(cell.limit, n, time.time(), n))
        return outcome

    def _failed(self, planned: Planned, cell: Cell, error: Exception) -> Outcome:
        code, sentence = explain(error)
        outcome = Outcome(planned.entry.title, cell.limit, None, sentence, code)
        unexpected = self._logs and not isinstance(error, UsageError | RunBusyError | RunLostError)
        self.tell(outcome, error if unexpected or planned.entry.config["debug"] is True else None)
        self._write(cell, CellState(cell.limit, 0, time.time(), self._totals.get(cell.place), sentence, code))
        return outcome

    @property
    def _logs(self) -> bool:
        """Whether what is said goes into a log, which nobody can ask again."""
        return self._place is not None and self._place.log is not None

    def _write(self, cell: Cell, state: CellState) -> None:
        where = state_path(cell.out, cell.run_id) if cell.shard is None else shard_state_path(cell.place)
        self._keep(where, state)

    def _keep(self, path: Path, state: CellState) -> None:
        if self._place is None:
            return
        try:
            write_state(path, replace(state, log=self._place.log))
        except OSError as error:  # the samples are the truth, this is for those who watch
            log.warning("%s cannot be written (%s)", path, error.strerror)

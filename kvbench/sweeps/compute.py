"""Compute planned runs in this process, and keep notes of their progress for other processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvbench.engine.compute import run_cells
from kvbench.report.trackers.watching import NoLogger, SweepCallback
from kvbench.results.definition import Entry
from kvbench.results.load import read_result
from kvbench.results.run_state import RunState, examples, write_state
from kvbench.results.sample import Sample
from kvbench.run.run import Run
from kvbench.sweeps.outcome import Messages, Outcome, is_expected, message_of
from kvbench.sweeps.plan import Planned

log = logging.getLogger(__name__)


class Recorder:
    """A `RunCallback` that keeps the outcome of every run and, for a sweep in `out`, a note of its progress.

    tracker: is called as well. messages: None for a single run, whose error is raised instead of printed.
    """

    def __init__(self, runs: Sequence[Planned], out: Path | None, tracker: SweepCallback) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.errors: dict[str, Exception] = {}
        self._runs = {run.entry.key: run.entry for run in runs}
        self._out, self._tracker = out, tracker
        self._totals: dict[str, int] = {}
        self.messages = Messages()

    def started(self, cell: Run, done: Sequence[Sample], total: int) -> None:
        """Examples of a run will be computed, `total` of them with those on disk, `done`."""
        self._tracker.started(cell, done, total)
        self._totals[cell.run_id] = total
        self._note(cell, RunState(cell.limit, total))

    def finished(self, cell: Run, sample: Sample) -> None:
        """One more example of a run is on disk."""
        self._tracker.finished(cell, sample)

    def ended(self, cell: Run, error: Exception | None) -> None:
        """A run is complete, or stopped because of `error`."""
        self._tracker.ended(cell, error)
        entry = self._runs[cell.run_id]
        if error is not None:
            self.errors[entry.key] = error
            message = message_of(error)
            self._print(entry, message, None if is_expected(error) else error)
            self.outcomes[entry.key] = Outcome(entry.key, entry.title, entry.limit, None, message)
            self._note(cell, RunState(cell.limit, self._totals.get(cell.run_id), message))
            return
        n, failed = examples(cell.folder)
        failure = f"{failed} of {n} examples failed, see {cell.folder}" if failed else None
        if failure is not None:
            self._print(entry, failure)
        self.outcomes[entry.key] = Outcome(entry.key, entry.title, entry.limit, cell.folder, failure)
        self._note(cell, RunState(cell.limit, n))

    def _print(self, entry: Entry, message: str, error: Exception | None = None) -> None:
        if self._out is not None:
            self.messages.print(entry.title, message, error)

    def _note(self, cell: Run, state: RunState) -> None:
        if self._out is None:
            return
        try:
            write_state(self._out, cell.run_id, state)
        except OSError as error:  # only those who watch need it
            log.warning("the state of %s cannot be written (%s)", cell.run_id, error.strerror)


def compute(runs: Sequence[Planned], out: Path | None, tracker: SweepCallback) -> Recorder:
    """Compute what is missing of all runs; the recorder holds their outcomes. out: None for a single run."""
    recorder = Recorder(runs, out, tracker)
    try:
        run_cells([run.cell for run in runs if run.cell is not None], recorder)
    finally:
        recorder.messages.print_counts()
    return recorder


def close_tracker(tracker: SweepCallback, out: Path, entries: Sequence[Entry]) -> None:
    """Give a tracker the results of all runs of a sweep, also those that other processes computed."""
    done = []
    for entry in entries if not isinstance(tracker, NoLogger) else ():
        with suppress(ValueError):  # damaged files were reported
            if examples(out / entry.key)[0]:
                done.append(read_result(out / entry.key, entry.limit))
    tracker.close(done)

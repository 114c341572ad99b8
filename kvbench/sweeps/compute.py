"""Compute planned runs in this process, and write their state for other processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.compute import compute_runs
from kvbench.engine.prompts import make_prompts
from kvbench.engine.run_writer import RunCallback
from kvbench.errors import UsageError
from kvbench.report.trackers.watching import SweepCallback, make_watch
from kvbench.results.load import read_result
from kvbench.results.run_state import RunState, examples, write_state
from kvbench.results.sample import Sample
from kvbench.run.run import Run
from kvbench.sweeps.plan import Composed, Messages, Planned, is_expected, message_of, plan

log = logging.getLogger(__name__)


class Recorder(RunCallback):
    """Writes the state of every run of the sweep in `out` and prints errors, then calls another.

    titles: of the runs, by run id.
    """

    def __init__(self, titles: dict[str, str], out: Path, tracker: SweepCallback) -> None:
        self._titles, self._out, self._tracker = titles, out, tracker
        self._totals: dict[str, int] = {}
        self.errors: list[str] = []
        self.messages = Messages()

    def started(self, run: Run, done: Sequence[Sample], total: int) -> None:
        """Examples of a run will be computed, `total` of them with those on disk, `done`."""
        self._tracker.started(run, done, total)
        self._totals[run.run_id] = total
        self._write(run)

    def finished(self, run: Run, sample: Sample) -> None:
        """One more example of a run is on disk."""
        self._tracker.finished(run, sample)

    def ended(self, run: Run, error: Exception | None) -> None:
        """A run is complete, or stopped because of `error`."""
        self._tracker.ended(run, error)
        message = None if error is None else message_of(error)
        if error is None:
            self._totals[run.run_id] = examples(run.folder)[0]
        if reported := message or failed_examples(run.folder):
            title = self._titles[run.run_id]
            self.messages.print(title, reported, None if error is None or is_expected(error) else error)
            self.errors.append(f"{title}: {reported}")
        self._write(run, message)

    def _write(self, run: Run, error: str | None = None) -> None:
        try:
            write_state(self._out, run.run_id, RunState(run.limit, self._totals.get(run.run_id), error))
        except OSError as reason:  # only `sweep status` reads it
            log.warning("the state of %s cannot be written (%s)", run.run_id, reason.strerror)


def failed_examples(folder: Path) -> str | None:
    """The error message of a run with failed examples; None if all of its examples have scores."""
    n, failed = examples(folder)
    return f"{failed} of {n} examples failed, see {folder}" if failed else None


def compute(runs: Sequence[Planned], out: Path, tracker: SweepCallback) -> list[str]:
    """Compute the missing examples of the runs of a sweep; returns the error messages of runs that failed.

    They are also printed, and written to the state of their run.
    """
    recorder = Recorder({one.entry.key: one.entry.title for one in runs}, out, tracker)
    try:
        compute_runs([one.run for one in runs if one.run is not None], recorder)
    finally:
        recorder.messages.print_counts()
    return recorder.errors


def run_one(composed: Composed) -> float | None:
    """Compute one run, print its table and return its score. Raises the error that kept it from being complete."""
    planned, _ = plan([composed])
    run = planned[0].run
    assert run is not None, "a wrong value of a single run raises an error"
    if composed.config["dry_run"] is True:
        print_plan(planned)
        return None
    tracker = make_watch(composed.config["logger"], None)
    try:
        error = compute_runs([run], tracker)[0].error
    finally:
        tracker.close()
    if error is not None:
        raise UsageError(message_of(error)) if is_expected(error) else error
    result = read_result(run.folder, run.limit)
    from kvbench.report.table import print_table  # pandas

    print_table([result])
    if message := failed_examples(run.folder):
        raise UsageError(message)
    return result.value


def print_plan(runs: Sequence[Planned]) -> None:
    """Print how many prompts and tokens each run has, and the first prompt; nothing is computed."""
    shown, counts = "", []
    made: dict[tuple[str, int | None], Any] = {}
    for entry, run in ((one.entry, one.run) for one in runs if one.run is not None):
        if (entry.group, run.limit) not in made:
            made[entry.group, run.limit] = make_prompts(run)
        prompts = made[entry.group, run.limit]
        counts.append(sum(len(prompt.ids) for prompt in prompts))
        shown = shown or str(run.checkpoint.tokenizer().decode(prompts[0].ids))
        sys.stdout.write(f"{entry.run_id}: {len(prompts)} prompts, {counts[-1]} tokens\n")
    shared = sum(len(prompt.ids) for prompts in made.values() for prompt in prompts)
    sys.stdout.write(f"{len(counts)} runs: {sum(counts)} prompt tokens, {shared} with shared prefills\n")
    sys.stdout.write(f"the first prompt:\n{shown}\n")

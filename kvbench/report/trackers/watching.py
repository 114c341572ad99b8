"""The interface of a tracker (`logger=`), and a wrapper that catches its errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvbench.config.tree import build, refusing_in
from kvbench.engine.run_writer import RunCallback
from kvbench.results.result import Result
from kvbench.results.sample import Sample
from kvbench.run.run import Run

log = logging.getLogger(__name__)


class SweepCallback(RunCallback):
    """A run callback with a method for the end of a sweep."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Called at the end. records: all finished runs of the sweep; empty if this process computed only some."""


def make_watch(logger: Mapping[str, Any], sweep: str | None) -> SweepCallback:
    """Build the callback from the resolved `logger` configuration: a class with a method `watch(sweep)`.

    sweep: the name of the sweep, None for a single run. Raises UsageError for wrong settings. Later errors of the
    tracker are logged as warnings.
    """
    with refusing_in("logger", logger, "logger: "):
        tracker = build(logger)
        if not hasattr(tracker, "watch"):
            raise ValueError(f"logger._target_={logger.get('_target_')} is not a logger")
        callback: SweepCallback = tracker.watch(sweep)
        return callback


class NoLogger(SweepCallback):
    """`logger=none`, and a callback that does nothing."""

    def watch(self, sweep: str | None) -> NoLogger:
        """Itself."""
        return self


class Guarded(SweepCallback):
    """Calls another callback until its first error, which is logged as a warning, so that a tracker never fails a run.

    name: of the tracker, for the warning.
    """

    def __init__(self, watch: SweepCallback, name: str) -> None:
        self._watch: SweepCallback = watch
        self._name = name

    def started(self, run: Run, done: Sequence[Sample], total: int) -> None:
        """Pass on the start of a run."""
        with self._guard():
            self._watch.started(run, done, total)

    def finished(self, run: Run, sample: Sample) -> None:
        """Pass on an example."""
        with self._guard():
            self._watch.finished(run, sample)

    def ended(self, run: Run, error: Exception | None) -> None:
        """Pass on the end of a run."""
        with self._guard():
            self._watch.ended(run, error)

    def close(self, records: Sequence[Result] = ()) -> None:
        """Pass on the end of the sweep. A second call does nothing."""
        with self._guard():
            self._watch.close(records)
        self._watch = NoLogger()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            details = (self._name, type(error).__name__, (str(error).strip().splitlines() or ["no message"])[0])
            log.warning("logger=%s failed (%s: %s) and is disabled; results are complete in out", *details)
            self._watch = NoLogger()

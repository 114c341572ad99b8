"""The interface of a tracker (`logger=`), and a wrapper that runs it in a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from kvbench.config.tree import build, refusing_in
from kvbench.engine.callbacks import NullCallback, RunCallback
from kvbench.results.result import Result
from kvbench.results.sample import Sample
from kvbench.run.run import Run

log = logging.getLogger(__name__)


class SweepCallback(RunCallback, Protocol):
    """A run callback with a method for the end of a sweep."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Called at the end. records: all finished runs of the sweep; empty if this process computed only some."""
        ...


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


class NoLogger(NullCallback):
    """`logger=none`, and a callback that does nothing."""

    def watch(self, sweep: str | None) -> NoLogger:
        """Itself."""
        return self

    def close(self, records: Sequence[Result] = ()) -> None:
        """Do nothing."""


class InThread:
    """Runs another callback in a thread, so that a slow or broken tracker neither delays nor fails a run.

    After its first error, which is logged as a warning, the callback is not called again. name: of the tracker, for
    warnings. patience: the maximum time that `close` waits, in seconds.
    """

    def __init__(self, watch: SweepCallback, name: str, patience: float) -> None:
        self._watch, self._name, self._patience = watch, name, patience
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def started(self, cell: Run, done: Sequence[Sample], total: int) -> None:
        """Queue the start of a run."""
        self._calls.put(partial(self._watch.started, cell, tuple(done), total))

    def finished(self, cell: Run, sample: Sample) -> None:
        """Queue an example."""
        self._calls.put(partial(self._watch.finished, cell, sample))

    def ended(self, cell: Run, error: Exception | None) -> None:
        """Queue the end of a run."""
        self._calls.put(partial(self._watch.ended, cell, error))

    def close(self, records: Sequence[Result] = ()) -> None:
        """Wait until all calls are done, at most `patience` seconds. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self._calls.put(partial(self._watch.close, tuple(records)))
        self._calls.put(None)
        until = time.monotonic() + self._patience
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.5)  # in short steps, so that Ctrl-C still works
        if self._thread.is_alive():
            log.warning("logger=%s did not send everything within %g s; results are in out", self._name, self._patience)

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except (Exception, SystemExit) as error:
            details = (self._name, type(error).__name__, (str(error).strip().splitlines() or ["no message"])[0])
            log.warning("logger=%s failed (%s: %s) and is disabled; results are complete in out", *details)

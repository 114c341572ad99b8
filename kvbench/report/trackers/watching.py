"""The interface of a tracker (`logger=`), and the thread in which it works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, runtime_checkable

from kvbench.analysis.result import Result
from kvbench.config.naming import refusing_in
from kvbench.config.tree import build
from kvbench.engine.watch import Nobody, Watch
from kvbench.identity.cell import Cell
from kvbench.records.sample import Sample

log = logging.getLogger(__name__)


class SweepWatch(Watch, Protocol):
    """A watch that is also called at the end of a sweep."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """The sweep has ended. records: all its finished runs; none in a process that computed only a part of them."""
        ...


@runtime_checkable
class Logger(Protocol):
    """What a file in conf/logger describes."""

    def watch(self, sweep: str | None) -> SweepWatch:
        """The watch of this tracker. Raises ValueError for settings with which it cannot work."""
        ...


def make_watch(logger: Mapping[str, Any], sweep: str | None) -> SweepWatch:
    """Build the watch that the resolved node `logger` of a configuration describes.

    sweep: the name of the sweep, None for a single run. Raises UsageError for wrong settings; later errors of the
    tracker are warnings.
    """
    with refusing_in("logger", logger, "logger: "):
        made = build(logger)
        if not isinstance(made, Logger):
            raise ValueError(f"logger._target_={logger.get('_target_')} is not a logger")
        return made.watch(sweep)


class Quiet(Nobody):
    """No tracker."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class NoLogger:
    """`logger=none`."""

    def watch(self, sweep: str | None) -> SweepWatch:
        """A watch that does nothing."""
        return Quiet()


class InThread:
    """Runs another watch in a thread, so that a slow or broken tracker neither delays nor fails a run.

    The watch's first error is logged as a warning and ends it. name: of the tracker, for warnings. patience: seconds
    that `close` waits at most.
    """

    def __init__(self, watch: SweepWatch, name: str, patience: float) -> None:
        self._watch, self._name, self._patience = watch, name, patience
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        """Pass on that a run begins."""
        done = tuple(done)
        self._calls.put(lambda: self._watch.started(cell, done, total))

    def finished(self, cell: Cell, sample: Sample) -> None:
        """Pass on an example."""
        self._calls.put(lambda: self._watch.finished(cell, sample))

    def ended(self, cell: Cell, error: Exception | None) -> None:
        """Pass on that a run has ended."""
        self._calls.put(lambda: self._watch.ended(cell, error))

    def close(self, records: Sequence[Result] = ()) -> None:
        """Wait until everything is sent, at most `patience` seconds. A second call does nothing."""
        if not self._thread.is_alive():
            return
        records = tuple(records)
        self._calls.put(lambda: self._watch.close(records))
        self._calls.put(None)
        until = time.monotonic() + self._patience
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.5)  # in short steps, so that Ctrl-C still works
        if self._thread.is_alive():
            log.warning("logger=%s has not sent everything after %g s; results are in out", self._name, self._patience)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except (Exception, SystemExit) as error:
                first = (str(error).strip().splitlines() or ["no message"])[0]
                what = (self._name, type(error).__name__, first)
                log.warning("logger=%s failed (%s: %s) and gets no more data; results are complete in out", *what)
                return

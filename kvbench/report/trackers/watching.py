"""Watches of a sweep: `make_watch` for the command line, and the thread in which a tracker works."""

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
    """A watch that also hears of the end of a sweep."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Nothing more will come: `records` are the sweep's finished runs, those computed elsewhere included.

        None at all: this process computed a share of the sweep, and somebody else will tell of the whole.
        """
        ...


@runtime_checkable
class Logger(Protocol):
    """What a file in conf/logger describes; making it checks what can be checked without a library."""

    def watch(self, sweep: str | None) -> SweepWatch:
        """The watch of a tracker. Raises ValueError for settings with which it cannot work."""
        ...


def make_watch(logger: Mapping[str, Any], sweep: str | None) -> SweepWatch:
    """The watch that the resolved node `logger` of a configuration describes. Raises UsageError.

    sweep: the group of its runs; None: a single cell. Later errors are warnings. `close` sends what is left.
    """
    with refusing_in("logger", logger, "logger: "):
        made = build(logger)
        if not isinstance(made, Logger):
            raise ValueError(f"logger._target_={logger.get('_target_')} is not a logger")
        return made.watch(sweep)


class Quiet(Nobody):
    """Nobody watches, nor waits for the end."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class NoLogger:
    """Results stay in `out`."""

    def watch(self, sweep: str | None) -> SweepWatch:
        """Nobody."""
        return Quiet()


class InThread:
    """Another watch in a thread of its own: it can neither delay a run nor end it.

    Its first error becomes a warning and ends it. name: of the watch in warnings. patience: the most seconds that
    `close` waits.
    """

    def __init__(self, watch: SweepWatch, name: str, patience: float) -> None:
        self._watch, self._name, self._patience = watch, name, patience
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        """Examples of a cell will be computed."""
        done = tuple(done)
        self._tasks.put(lambda: self._watch.started(cell, done, total))

    def finished(self, cell: Cell, sample: Sample) -> None:
        """One more example is on disk."""
        self._tasks.put(lambda: self._watch.finished(cell, sample))

    def ended(self, cell: Cell, error: Exception | None) -> None:
        """A cell is complete, or went no further."""
        self._tasks.put(lambda: self._watch.ended(cell, error))

    def close(self, records: Sequence[Result] = ()) -> None:
        """Wait until everything is sent, at most `patience` seconds. Closing twice does nothing."""
        if not self._thread.is_alive():
            return
        records = tuple(records)
        self._tasks.put(lambda: self._watch.close(records))
        self._tasks.put(None)
        until = time.monotonic() + self._patience
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.5)  # in short steps, so that Ctrl-C is heard
        if self._thread.is_alive():
            log.warning("logger=%s still sends after %g s and is not waited for longer", self._name, self._patience)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (Exception, SystemExit) as error:
                lines = str(error).strip().splitlines() or ["no message"]
                log.warning(
                    "logger=%s is told no more (%s: %s); results are complete in out, and "
                    "`python -m kvbench.results %s DIR` sends them",
                    *(self._name, type(error).__name__, lines[0], self._name),
                )
                return

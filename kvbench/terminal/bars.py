"""Progress bars with the remaining time on a terminal; one line per minute in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tqdm.auto import tqdm

LINE_SECONDS = 60.0

Item = TypeVar("Item")


class Advance(Protocol):
    """Advances a bar by a number of units. note: text after the bar until the next note. total: the end, once known."""

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None: ...


def progress(items: Iterable[Item], title: str, total: int | None = None, done: int = 0) -> Iterator[Item]:
    """Yield `items` and draw a bar on stderr. total: number of items; done: number of earlier ones."""
    with meter(title, total, done) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def meter(title: str, total: int | None = None, done: int = 0, unit: str = "") -> Iterator[Advance]:
    """A bar on stderr or in a notebook, from `done` to `total`; yields the function that advances it.

    unit: the name of the units, in the plural ("tokens").
    """
    if "ipykernel" not in sys.modules and not sys.stderr.isatty():
        yield _Lines(title, total, done, unit)
        return
    named = f" {unit}" if unit else "it"
    with tqdm(desc=title, total=total, initial=done, unit=named, leave=False, dynamic_ncols=True) as bar:

        def advance(units: int, note: str | None = None, total: int | None = None) -> None:
            bar.total = bar.total if total is None else total
            bar.update(units)
            if note is not None:
                bar.set_postfix_str(note)

        yield advance


class _Lines:
    """Writes progress as a line on stderr, once a minute."""

    def __init__(self, title: str, total: int | None, done: int, unit: str) -> None:
        self._title, self._total, self._done, self._unit, self._note = title, total, done, unit, ""
        self._first, self._began = done, time.monotonic()
        self._written = self._began

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None:
        self._done, self._total = self._done + units, self._total if total is None else total
        self._note = self._note if note is None else note
        now = time.monotonic()
        if now - self._written >= LINE_SECONDS:
            self._written = now
            of = "" if self._total is None else f" of {self._total}"
            unit = f" {self._unit}" if self._unit else ""
            notes = ", ".join(filter(None, [self._remaining(now), self._note]))
            behind = f" ({notes})" if notes else ""
            sys.stderr.write(f"kvbench: {self._title}: {self._done}{of}{unit}{behind}\n")
            sys.stderr.flush()

    def _remaining(self, now: float) -> str:
        """The time for the remaining units at the average speed so far."""
        done = self._done - self._first
        if self._total is None or done <= 0:
            return ""
        seconds = (now - self._began) * max(0, self._total - self._done) / done
        return f"{tqdm.format_interval(seconds)} left"

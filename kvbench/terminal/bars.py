"""Progress bars on a terminal; elsewhere, in a log file say, a line a minute."""

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
    """Moves a bar on by so many units. note: shown behind it until there is another. total: its end, once known."""

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None: ...


def progress(items: Iterable[Item], title: str, total: int | None = None, done: int = 0) -> Iterator[Item]:
    """Yield `items`, drawing a bar on stderr while they last. total, done: how many there are, and were before."""
    with meter(title, total, done) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def meter(title: str, total: int | None = None, done: int = 0) -> Iterator[Advance]:
    """A bar on stderr or in a notebook, and what moves it on towards its `total` of units, of which some are `done`."""
    if "ipykernel" not in sys.modules and not sys.stderr.isatty():
        yield _Lines(title, total, done)
        return
    with tqdm(desc=title, total=total, initial=done, leave=False, dynamic_ncols=True) as bar:

        def advance(units: int, note: str | None = None, total: int | None = None) -> None:
            bar.total = bar.total if total is None else total
            bar.update(units)
            if note is not None:
                bar.set_postfix_str(note)

        yield advance


class _Lines:
    """What moves a bar, as a line on stderr now and then: none where all is done before."""

    def __init__(self, title: str, total: int | None, done: int) -> None:
        self._title, self._total, self._done, self._note = title, total, done, ""
        self._told = time.monotonic()

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None:
        self._done, self._total = self._done + units, self._total if total is None else total
        self._note = self._note if note is None else f" ({note})"
        now = time.monotonic()
        if now - self._told >= LINE_SECONDS:
            self._told = now
            of = "" if self._total is None else f" of {self._total}"
            sys.stderr.write(f"kvbench: {self._title}: {self._done}{of}{self._note}\n")
            sys.stderr.flush()

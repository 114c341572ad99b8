"""Progress bars, on a terminal only: a log file gets none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
    """A bar on stderr, and what moves it on towards its `total` of units, of which some are `done`."""
    if not sys.stderr.isatty():
        yield lambda units, note=None, total=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")

        def advance(units: int, note: str | None = None, total: int | None = None) -> None:
            bar.update(task, advance=units, total=total)
            if note is not None:
                bar.update(task, note=note)

        yield advance

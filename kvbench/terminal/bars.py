"""Progress bars, on a terminal only: a log file gets none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def progress(items: Iterable[Item], title: str, total: int | None = None, done: int = 0) -> Iterator[Item]:
    """Yield `items`, drawing a bar on stderr while they last. total, done: how many there are, and were before."""
    with meter(title, total, done) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def meter(title: str, total: int | None = None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, and the function that moves it on by so many units of its `total`, of which some are `done`."""
    if not sys.stderr.isatty():
        yield lambda units: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda units: bar.advance(task, units)

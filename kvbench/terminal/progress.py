"""Progress bars on a terminal or in a notebook; in a log file, a line once a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TypeVar

LINE_SECONDS = 60.0  # between two lines of a progress bar in a log file
BAR_SECONDS = 0.5  # between two states of a bar; a notebook keeps all of them
Item = TypeVar("Item")


class Advance(Protocol):
    """Advances a bar by a number of units. note: text after the bar until the next note. total: the end, once known."""

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None: ...


def progress(items: Iterable[Item], title: str, total: int | None = None, done: int = 0) -> Iterator[Item]:
    """Yield `items` with a progress bar on stderr. total: number of items; done: number of items finished before."""
    with meter(title, total, done) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def meter(title: str, total: int | None = None, done: int = 0, unit: str = "") -> Iterator[Advance]:
    """A bar on stderr or in a notebook, and the function that advances it from `done` towards `total`.

    unit: the counted units, in the plural ("tokens").
    """
    notebook = "ipykernel" in sys.modules
    if notebook and find_spec("ipywidgets") is None:
        from tqdm import tqdm  # `auto` would warn
    else:
        from tqdm.auto import tqdm  # imports asyncio and more, which `--help` need not wait for
    shown = notebook or sys.stderr.isatty()
    where = {"leave": False, "dynamic_ncols": True, "disable": not shown, "position": 0 if notebook else None}
    bar = tqdm(desc=title, total=total, initial=done, unit=f" {unit}" if unit else "it", **where)
    began = written = time.monotonic()
    count, behind = done, ""

    def advance(units: int, note: str | None = None, total: int | None = None) -> None:
        nonlocal count, behind, written
        count += units
        bar.total = bar.total if total is None else total
        behind = behind if note is None else note
        bar.set_postfix_str(behind, refresh=False)
        bar.update(units)
        now = time.monotonic()
        if now - written < (BAR_SECONDS if shown else LINE_SECONDS):
            return
        written = now
        if shown:
            bar.refresh()
            return
        of = "" if bar.total is None else f" of {bar.total}"
        left = ""
        if bar.total is not None and count > done:  # at the average speed so far
            seconds = (now - began) * max(0, bar.total - count) / (count - done)
            left = f"{tqdm.format_interval(seconds)} left"
        notes = ", ".join(filter(None, [left, behind]))
        line = f"{title}: {count}{of}{f' {unit}' if unit else ''}{f' ({notes})' if notes else ''}"
        sys.stderr.write(f"kvbench: {line}\n")
        sys.stderr.flush()

    with bar:
        yield advance

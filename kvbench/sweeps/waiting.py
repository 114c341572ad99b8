"""One bar over all examples of a sweep, read from its files, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from kvbench.records.cell_state import read_states
from kvbench.records.definition import Entry
from kvbench.records.samples import FILE_NAME
from kvbench.records.shards import on_disk, shard_folders
from kvbench.terminal.bars import meter


def examples_done(out: Path, entry: Entry) -> int:
    """How many examples of a cell are on disk, in shards too."""
    if entry.run_id is None:
        return 0
    folder = out / entry.run_id
    if shard_folders(folder):
        return len(on_disk(folder))
    try:
        stat = (folder / FILE_NAME).stat()
        return _lines(folder / FILE_NAME, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return 0


@lru_cache(maxsize=10_000)
def _lines(path: Path, modified: int, size: int) -> int:
    """Read once as long as nobody writes: somebody who waits looks every second."""
    return path.read_bytes().count(b"\n")


def totals(out: Path, entries: Sequence[Entry]) -> list[int | None]:
    """How many examples each cell will have: what its task has, at most its limit; None: nobody built the task yet."""
    known: dict[str, int] = {}
    for entry in entries:
        states = {} if entry.run_id is None else read_states(out, entry.run_id)
        known.update((entry.group, state.in_task) for state in states.values() if state.in_task is not None)
    return [_least(known.get(entry.group), entry.limit) for entry in entries]


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


@contextmanager
def sample_meter(out: Path, entries: Sequence[Entry]) -> Iterator[Callable[[], None]]:
    """A bar, and the function that brings it up to what the files say; without a terminal nothing is drawn."""
    entries = [entry for entry in entries if entry.run_id is not None]
    shown, total = sum(examples_done(out, entry) for entry in entries), _sum(totals(out, entries))
    with meter("examples", total, shown) as advance:

        def look() -> None:
            nonlocal shown, total
            done = sum(examples_done(out, entry) for entry in entries)
            if total is None:  # until every task was built
                total = _sum(totals(out, entries))
            advance(done - shown, total=total)
            shown = done

        yield look


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None

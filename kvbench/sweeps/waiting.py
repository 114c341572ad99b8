"""One bar over all examples of a sweep, read from its files, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvbench.runs.cell_state import finished_examples, read_state
from kvbench.runs.definition import Entry
from kvbench.runs.samples import FILE_NAME
from kvbench.terminal.bars import meter


def examples_done(out: Path, entry: Entry) -> int:
    """How many examples of a cell are on disk."""
    if entry.run_id is None:
        return 0
    state = read_state(out, entry.run_id)
    if state is None or state.state != "running":
        return finished_examples(out, entry.run_id) or _lines(out / entry.run_id / FILE_NAME)
    return _lines(out / entry.run_id / FILE_NAME)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def totals(out: Path, entries: Sequence[Entry]) -> list[int | None]:
    """How many examples each cell will have: what its task was seen to have, at most its limit; None: unknown yet."""
    states = [None if entry.run_id is None else read_state(out, entry.run_id) for entry in entries]
    known = {e.group: s.total for e, s in zip(entries, states, strict=True) if s is not None and s.total is not None}
    found = []
    for entry in entries:
        limits = [number for number in (known.get(entry.group), entry.limit) if number is not None]
        found.append(min(limits, default=None))
    return found


@contextmanager
def sample_meter(out: Path, entries: Sequence[Entry]) -> Iterator[Callable[[], None]]:
    """A bar, and the function that brings it up to what the files say; without a terminal nothing is drawn."""
    entries = [entry for entry in entries if entry.run_id is not None]
    shown = sum(examples_done(out, entry) for entry in entries)
    all_of_them = totals(out, entries)
    total = sum(n for n in all_of_them if n is not None) if None not in all_of_them else None
    with meter("examples", total, shown) as advance:

        def look() -> None:
            nonlocal shown
            done = sum(examples_done(out, entry) for entry in entries)
            advance(done - shown)
            shown = done

        yield look

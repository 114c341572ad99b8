"""Progress of a sweep's cells: counted from their samples, with a note for each that was begun.

The samples are the truth. A note is what they cannot say: since when a cell is computed, why it went no further, and
how many examples its task has. It lies beside the sweep, or with the shard that it is about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from kvbench.records.definition import SWEEP_FOLDER, Entry
from kvbench.records.files import write_json
from kvbench.records.samples import FILE_NAME, read_samples
from kvbench.records.shards import shard_folders
from kvbench.terminal.command import WRONG


@dataclass(frozen=True)
class CellState:
    """The note of the process that computes a cell, or did so last. Times are seconds since 1970."""

    limit: int | None
    done: int  # examples on disk when it was begun
    since: float
    total: int | None = None  # examples it will have, once its prompts are made
    error: str | None = None  # why it went no further, with its exit code
    code: int = 0
    log: str | None = None

    @property
    def in_task(self) -> int | None:
        """All examples of the cell's task; None where nobody knows, or a limit hides it."""
        return self.total if self.total is not None and (self.limit is None or self.total < self.limit) else None


def state_path(out: Path, run_id: str) -> Path:
    """Where the note of a cell lies."""
    return out / SWEEP_FOLDER / "cells" / f"{run_id}.json"


def shard_state_path(shard: Path) -> Path:
    """Where the note of a shard lies: with it, and it goes with it."""
    return shard / "state.json"


def write_state(path: Path, state: CellState) -> None:
    """Write the note of a cell. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(state))


def read_states(out: Path, run_id: str) -> dict[Path, CellState]:
    """The notes of a cell and of each of its shards, by the folders that hold their samples."""
    folder = out / run_id
    paths = {folder: state_path(out, run_id), **{shard: shard_state_path(shard) for shard in shard_folders(folder)}}
    notes = {place: _read(path) for place, path in paths.items()}
    return {place: state for place, state in notes.items() if state is not None}


def failure(states: Mapping[Path, CellState]) -> CellState | None:
    """The note of a cell or shard that failed, if there is one."""
    return next((state for state in states.values() if state.error is not None), None)


def _read(path: Path) -> CellState | None:
    try:
        return CellState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def examples(folder: Path) -> tuple[int, int]:
    """How many examples a run that was summed up has, and how many of them failed, as its samples say.

    Nothing of one without metrics, or whose samples are no longer all there. Raises ValueError where they are damaged.
    """
    try:
        summed = int(json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["n"])
        stat = (folder / FILE_NAME).stat()
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    n, failed = _counted(folder / FILE_NAME, stat.st_mtime_ns, stat.st_size)
    return (n, failed) if n >= summed else (0, 0)


@lru_cache(maxsize=10_000)
def _counted(path: Path, modified: int, size: int) -> tuple[int, int]:
    """Samples in a file, and those that failed; read once, however often somebody looks."""
    samples = read_samples(path)
    return len(samples), sum(sample.error is not None for sample in samples)


def is_complete(out: Path, entry: Entry) -> bool:
    """Whether all examples an entry asks for are on disk, as far as that can be known without its task's data.

    A run that was refused when it was asked for last is not complete: its data has changed, perhaps.
    """
    try:
        n = 0 if entry.run_id is None else examples(out / entry.run_id)[0]
    except ValueError:
        return False
    if entry.run_id is None or not n:
        return False
    failed = failure(read_states(out, entry.run_id))
    if failed is not None and failed.code == WRONG:
        return False
    if entry.limit is not None and n >= entry.limit:
        return True
    said = _read(state_path(out, entry.run_id))
    return said is not None and said.in_task is not None and n >= said.in_task

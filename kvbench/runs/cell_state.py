"""How far the cells of a sweep are: a small file for each that was begun, beside the sweep, and what the samples say.

The samples stay the truth. What is written here is what they cannot say: who computes a cell since when, why it went no
further, and how many examples its task has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbench.runs.definition import SWEEP_FOLDER, Entry
from kvbench.runs.files import write_json
from kvbench.runs.samples import FILE_NAME
from kvbench.runs.shards import shard_folders
from kvbench.terminal.command import WRONG


@dataclass(frozen=True)
class CellState:
    """What the process that computes a cell, or computed it last, said of it. Times are seconds since 1970."""

    state: str  # running, finished, failed
    limit: int | None
    done: int  # examples on disk: when it began, or, once it ended, at the end
    since: float
    until: float | None = None
    error: str | None = None
    code: int = 0
    host: str = ""
    pid: int = 0
    log: str | None = None
    total: int | None = None  # examples it will have, once its prompts are made

    @property
    def in_task(self) -> int | None:
        """All examples of the cell's task; None where nobody knows, or a limit hides it."""
        seen = self.done if self.state == "finished" else self.total
        return seen if seen is not None and (self.limit is None or seen < self.limit) else None


def state_path(out: Path, run_id: str) -> Path:
    """Where the state of a cell lies."""
    return out / SWEEP_FOLDER / "cells" / f"{run_id}.json"


def shard_state_path(shard: Path) -> Path:
    """Where the state of a shard lies: with it, and it goes with it."""
    return shard / "state.json"


def write_state(path: Path, state: CellState) -> None:
    """Say how far a cell is. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(state))


def read_state(out: Path, run_id: str) -> CellState | None:
    """What was last said of a cell as a whole; None where nothing was, or it cannot be read."""
    return _read(state_path(out, run_id))


def read_states(out: Path, run_id: str) -> dict[Path, CellState]:
    """What was last said of a cell, and of each of its shards, by the folders that hold their samples."""
    folder = out / run_id
    shards = {shard: _read(shard_state_path(shard)) for shard in shard_folders(folder)}
    return {place: state for place, state in {folder: read_state(out, run_id), **shards}.items() if state is not None}


def failure(states: Mapping[Path, CellState]) -> CellState | None:
    """Of a cell and its shards the one that went no further, if there is one."""
    return next((state for state in states.values() if state.state == "failed"), None)


def _read(path: Path) -> CellState | None:
    try:
        return CellState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def finished_examples(out: Path, run_id: str) -> int | None:
    """How many examples a cell's metrics are about; None where there are none, or their samples are gone."""
    folder = out / run_id
    try:
        numbers = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        return int(numbers["n"]) if (folder / FILE_NAME).exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_complete(out: Path, entry: Entry) -> bool:
    """Whether all examples an entry asks for are on disk, as far as that can be known without its task's data.

    A run that was refused when it was asked for last is not complete: its data has changed, perhaps.
    """
    n = None if entry.run_id is None else finished_examples(out, entry.run_id)
    if entry.run_id is None or n is None:
        return False
    failed = failure(read_states(out, entry.run_id))
    if failed is not None and failed.code == WRONG:
        return False
    if entry.limit is not None and n >= entry.limit:
        return True
    said = read_state(out, entry.run_id)
    return said is not None and said.in_task is not None and n >= said.in_task

"""Progress of the runs of a sweep: counted from their samples, and a state file with totals and errors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from kvbench.results.definition import SWEEP_FOLDER, Entry
from kvbench.results.files import write_json
from kvbench.results.samples import FILE_NAME, read_samples


@dataclass(frozen=True)
class RunState:
    """State that the last process of a run stored. total: number of examples under `limit`. error: why it stopped."""

    limit: int | None
    total: int | None = None
    error: str | None = None

    @property
    def in_task(self) -> int | None:
        """The number of examples of the run's task; None if it is unknown because of the limit."""
        return self.total if self.total is not None and (self.limit is None or self.total < self.limit) else None


def state_path(out: Path, run_id: str) -> Path:
    """The path of a run's state file."""
    return out / SWEEP_FOLDER / "cells" / f"{run_id}.json"


def write_state(out: Path, run_id: str, state: RunState) -> None:
    """Write the state of a run. Raises OSError."""
    state_path(out, run_id).parent.mkdir(parents=True, exist_ok=True)
    write_json(state_path(out, run_id), asdict(state))


def read_state(out: Path, run_id: str) -> RunState | None:
    """The state of a run; None if it was never started."""
    try:
        return RunState(**json.loads(state_path(out, run_id).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def examples(folder: Path) -> tuple[int, int]:
    """The number of examples of a summarized run, and how many of them failed; (0, 0) for an unfinished run.

    Raises ValueError if its samples are damaged.
    """
    try:
        summarized = int(json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["n"])
        stat = (folder / FILE_NAME).stat()
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    n, failed = _counted(folder / FILE_NAME, stat.st_mtime_ns, stat.st_size)
    return (n, failed) if n >= summarized else (0, 0)


@lru_cache(maxsize=10_000)
def _counted(path: Path, modified: int, size: int) -> tuple[int, int]:
    """Numbers of samples and of failed samples in a file; cached until the file changes."""
    samples = read_samples(path)
    return len(samples), sum(sample.error is not None for sample in samples)


def lines(folder: Path) -> int:
    """The number of examples of a run on disk."""
    try:
        return (folder / FILE_NAME).read_bytes().count(b"\n")
    except OSError:
        return 0


def is_complete(out: Path, entry: Entry) -> bool:
    """Whether all examples of a run are on disk, as far as this is known without loading the task."""
    if entry.run_id is None:
        return False
    try:
        n, _ = examples(out / entry.run_id)
    except ValueError:
        return False
    state = read_state(out, entry.run_id)
    if not n or (state is not None and state.error is not None):
        return False
    in_task = None if state is None else state.in_task
    return (entry.limit is not None and n >= entry.limit) or (in_task is not None and n >= in_task)

"""What a sweep leaves in its folder, made by hand, and commands of SLURM that say one thing."""

import json
from pathlib import Path

from kvbench.records.cell_state import CellState
from kvbench.records.definition import Entry
from kvbench.records.sample import Sample


def entry(name: str, task: str = "niah", limit: int | None = 4) -> Entry:
    identity = {"model": {}, "dtype": "float32", "task": {"name": task}, "seed": 0, "generation": {}, "budget": 64}
    return Entry(f"policy={name}", "pocket", name, task, limit, {"budget": 64}, name, (), identity)


def note(limit: int | None, total: int | None, error: str | None = None) -> CellState:
    return CellState(limit, 0, since=0.0, total=total, error=error)


def summed_up(folder: Path, n: int, errors: dict[int, str] | None = None) -> Path:
    """A run of n examples, some of which failed, as far as a status reads it; its samples."""
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps({"n": n}))
    rows = [{**vars(Sample(i, "ab", 9, [])), "error": (errors or {}).get(i)} for i in range(n)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "samples.jsonl"


def program(folder: Path, name: str, says: str, code: int = 0) -> None:
    """A command of SLURM that says one thing."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}' >&{1 + (code != 0)}\nexit {code}\n")
    path.chmod(0o700)

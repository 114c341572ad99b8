"""The arrays that were submitted for a sweep, as its folder knows them, and which of their tasks has which cell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbench.records.cell_state import CellState
from kvbench.records.definition import SWEEP_FOLDER
from kvbench.records.files import write_json
from kvbench.sweeps import queue
from kvbench.sweeps.queue import JobState
from kvbench.sweeps.shares import read_share

LOGS = Path(SWEEP_FOLDER) / "logs"


@dataclass(frozen=True)
class Job:
    """One array that was submitted: its number, and the stamp of its shares."""

    array: str
    stamp: str
    tasks: int

    @property
    def names(self) -> list[str]:
        """Its tasks, as SLURM names them."""
        return [f"{self.array}_{number}" for number in range(self.tasks)]


def write_job(out: Path, job: Job) -> None:
    """Remember an array."""
    path = out / SWEEP_FOLDER / "jobs" / f"{job.stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(job))


def read_jobs(out: Path) -> list[Job]:
    """All arrays that were submitted for a folder, in the order of their numbers: clocks of clients may disagree."""
    paths = (out / SWEEP_FOLDER / "jobs").glob("*.json")
    jobs = [Job(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(jobs, key=lambda job: int(job.array))


@dataclass(frozen=True)
class Given:
    """The tasks that have a cell or a shard of it, with what SLURM says: the last array's, and others that live."""

    tasks: Mapping[str, JobState | None] = field(default_factory=dict)

    @property
    def living(self) -> dict[str, JobState]:
        """Those that wait or run, or may do so."""
        return {task: state for task, state in self.tasks.items() if state is not None and state.lives}

    @property
    def ended(self) -> tuple[str, JobState | None]:
        """One that ended, otherwise than well if there is such."""
        return min(self.tasks.items(), key=lambda item: item[1] is not None and item[1].state == "COMPLETED")

    def running(self, notes: Iterable[CellState | None]) -> set[str]:
        """Those that run, as far as SLURM says, and wrote one of these notes."""
        wrote = {Path(note.log).stem for note in notes if note is not None and note.log is not None}
        return {task for task, job in self.living.items() if job.state in ("RUNNING", queue.UNKNOWN)} & wrote


NOT_GIVEN = Given()


def given_cells(out: Path) -> dict[str, Given]:
    """To which tasks every cell was given, by its key."""
    jobs = read_jobs(out)
    states = queue.job_states([task for job in jobs for task in job.names])
    found: dict[str, Given] = {}
    for job in jobs:
        tasks: dict[str, dict[str, JobState | None]] = {}
        for number, task in enumerate(job.names):
            for key, _ in read_share(out, f"{job.stamp}-{number}")[0]:
                tasks.setdefault(key, {})[task] = states.get(task)
        found |= {key: Given({**found.get(key, NOT_GIVEN).living, **its}) for key, its in tasks.items()}
    return found

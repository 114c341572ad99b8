"""How far every cell of a sweep is, from the files in its folder and from SLURM's queue."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvbench.runs.cell_state import SWEEP_FOLDER, CellState, is_complete, read_state
from kvbench.runs.claims import owner_of
from kvbench.runs.definition import Definition, Entry
from kvbench.runs.files import write_json
from kvbench.sweeps.queue import JobState, job_states
from kvbench.sweeps.shares import read_share
from kvbench.sweeps.waiting import examples_done, totals

FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "left"


@dataclass(frozen=True)
class Job:
    """One array that was submitted: its number, and the stamp of its shares."""

    array: str
    stamp: str
    tasks: int


@dataclass(frozen=True)
class Status:
    """How far a cell is. sentence: why it failed, or waits. rate: examples per second since it was begun last."""

    entry: Entry
    state: str
    done: int = 0
    total: int | None = None
    rate: float | None = None
    job: str | None = None
    sentence: str = ""
    log: str | None = None

    @property
    def remaining(self) -> float | None:
        """Seconds it will take at this rate."""
        return None if not self.rate or self.total is None else (self.total - self.done) / self.rate


def write_job(out: Path, job: Job) -> None:
    """Remember an array."""
    path = out / SWEEP_FOLDER / "jobs" / f"{job.stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(job))


def read_jobs(out: Path) -> list[Job]:
    """All arrays that were submitted for a folder, the first one first."""
    paths = sorted((out / SWEEP_FOLDER / "jobs").glob("*.json"))
    return [Job(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def statuses(out: Path, definition: Definition) -> list[Status]:
    """How far every cell of a sweep is, in its order."""
    jobs = read_jobs(out)
    states = job_states([job.array for job in jobs])
    task_of: dict[str, tuple[str, Job]] = {}  # of several the latest
    for job in jobs:
        for number in range(job.tasks):
            for key in read_share(out, f"{job.stamp}-{number}")[0]:
                task_of[key] = f"{job.array}_{number}", job
    numbers = totals(out, definition.cells)
    return [_status(out, e, n, task_of.get(e.key), states) for e, n in zip(definition.cells, numbers, strict=True)]


def _status(
    out: Path, entry: Entry, total: int | None, where: tuple[str, Job] | None, states: Mapping[str, JobState]
) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, sentence=entry.error or "")
    done = examples_done(out, entry)
    task = None if where is None else where[0]
    said = read_state(out, entry.run_id)
    if is_complete(out, entry):
        total = done if entry.limit is None else min(done, entry.limit)
        return Status(entry, FINISHED, total, total, job=task)
    job = None if task is None else states.get(task)
    owner = owner_of(out / entry.run_id)
    if owner is not None and owner.is_dead is not True and (owner.job is None or (job and job.state == "RUNNING")):
        return Status(entry, RUNNING, done, total, _rate(said, done), owner.job or str(owner))
    log = None if task is None else str(out / SWEEP_FOLDER / "logs" / f"{task}.log")
    failed = said is not None and said.state == "failed"
    if job is not None and job.lives and not (failed and job.state == "RUNNING" and _since(said, where)):
        return Status(entry, QUEUED, done, total, job=task, sentence=job.about, log=log)
    if said is not None and failed:
        return Status(entry, FAILED, done, total, job=task, sentence=said.error or "", log=said.log)
    if task is not None:
        became = job.sentence if job else "is gone, SLURM knows nothing of it"
        return Status(entry, FAILED, done, total, job=task, sentence=f"job {task} {became}", log=log)
    return Status(entry, LEFT, done, total, sentence="" if owner is None else f"{owner} is gone")


def _since(said: CellState | None, where: tuple[str, Job] | None) -> bool:
    """Whether a state was written for a job's share, not before it was submitted."""
    if said is None or where is None:
        return False
    submitted = time.mktime(time.strptime(where[1].stamp[:15], "%Y%m%d-%H%M%S"))
    return said.since >= submitted


def _rate(said: CellState | None, done: int) -> float | None:
    """Examples per second since the cell was begun last."""
    if said is None or said.state != "running" or done <= said.done:
        return None
    return (done - said.done) / max(time.time() - said.since, 1e-3)


def print_status(found: Sequence[Status]) -> None:
    """A row for each cell, then why some failed, then how many there are of each kind."""
    table = Table(box=None)
    for name, side in (("cell", "left"), ("state", "left"), ("examples", "right"), ("per min", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("remaining", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for s in found:
        rate = "" if s.rate is None else f"{60 * s.rate:.3g}"
        examples = f"{s.done}/{'?' if s.total is None else s.total}" if s.entry.run_id else "-"
        about = f" ({s.sentence})" if s.state == QUEUED and s.sentence not in ("", "None") else ""
        table.add_row(s.entry.title, s.state, examples, rate, _duration(s.remaining), (s.job or "") + about)
    console = Console(file=sys.stdout, width=300, highlight=False)
    with console.capture() as text:
        console.print(table)
    sys.stdout.write("\n".join(line.rstrip() for line in text.get().splitlines()) + "\n")
    for s in found:
        if s.state == FAILED:
            sys.stdout.write(f"{s.entry.title}: {s.sentence}{f' (log: {s.log})' if s.log else ''}\n")
    counts = Counter(s.state for s in found)
    listed = ", ".join(f"{counts[name]} {name}" for name in (FINISHED, RUNNING, QUEUED, FAILED, LEFT) if counts[name])
    done, known = sum(s.done for s in found), [s.total for s in found if s.entry.run_id]
    total = "?" if None in known else sum(n for n in known if n is not None)
    sys.stdout.write(f"{len(found)} cells: {listed}; {done} of {total} examples\n")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

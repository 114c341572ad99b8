"""How far every cell of a sweep is, from the files in its folder and from SLURM's queue."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvbench.runs.cell_state import SWEEP_FOLDER, CellState, is_complete, read_states
from kvbench.runs.claims import Owner, owner_of
from kvbench.runs.definition import Definition, Entry
from kvbench.runs.files import write_json
from kvbench.runs.samples import FILE_NAME
from kvbench.runs.shards import SHARD_FILE, indices
from kvbench.sweeps import queue
from kvbench.sweeps.queue import JobState
from kvbench.sweeps.shares import read_share
from kvbench.sweeps.waiting import examples_done, totals

FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "left"


@dataclass(frozen=True)
class Job:
    """One array that was submitted: its number ("" before sbatch said it), and the stamp of its shares."""

    array: str
    stamp: str
    tasks: int


@dataclass(frozen=True)
class Status:
    """How far a cell is. sentence: why it failed, or waits. rate: examples per second since it was begun last.

    where: the processes or the job that have it. jobs: those of SLURM's array tasks that wait or run for it; owners:
    the processes that compute it.
    """

    entry: Entry
    state: str
    done: int = 0
    total: int | None = None
    rate: float | None = None
    where: str = ""
    sentence: str = ""
    log: str | None = None
    jobs: tuple[str, ...] = ()
    owners: tuple[Owner, ...] = ()

    @property
    def remaining(self) -> float | None:
        """Seconds it will take at this rate."""
        return None if not self.rate or self.total is None else (self.total - self.done) / self.rate


def write_job(out: Path, job: Job) -> None:
    """Remember an array."""
    path = _job_path(out, job.stamp)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(job))


def forget_job(out: Path, stamp: str) -> None:
    """An array was not submitted after all."""
    _job_path(out, stamp).unlink()


def _job_path(out: Path, stamp: str) -> Path:
    return out / SWEEP_FOLDER / "jobs" / f"{stamp}.json"


def read_jobs(out: Path) -> list[Job]:
    """All arrays that were submitted for a folder, the first one first.

    Also one whose client was killed before it learnt the number: SLURM knows the array by its stamp.
    """
    paths = sorted((out / SWEEP_FOLDER / "jobs").glob("*.json"))
    jobs = [Job(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    if not all(job.array for job in jobs):
        known = queue.arrays_by_comment()
        jobs = [job if job.array else replace(job, array=known.get(job.stamp, "")) for job in jobs]
    return [job for job in jobs if job.array]


def statuses(out: Path, definition: Definition) -> list[Status]:
    """How far every cell of a sweep is, in its order."""
    jobs = read_jobs(out)
    states = queue.job_states([job.array for job in jobs])
    given: dict[str, _Given] = {}  # of several arrays the latest
    for job in jobs:
        tasks: dict[str, list[str]] = {}
        for number in range(job.tasks):
            for key, _ in read_share(out, f"{job.stamp}-{number}")[0]:
                tasks.setdefault(key, []).append(f"{job.array}_{number}")
        given |= {key: _Given(job, {task: states.get(task) for task in found}) for key, found in tasks.items()}
    numbers = totals(out, definition.cells)
    return [_status(out, e, n, given.get(e.key)) for e, n in zip(definition.cells, numbers, strict=True)]


@dataclass(frozen=True)
class _Given:
    """The array that a cell was given to last, and those of its tasks that have a part of it, as SLURM knows them."""

    job: Job
    tasks: Mapping[str, JobState | None]

    @property
    def living(self) -> dict[str, JobState]:
        """Those that wait or run."""
        return {task: state for task, state in self.tasks.items() if state is not None and state.lives}

    def runs(self, task: str | None) -> bool:
        """Whether one of them is a task that runs."""
        state = self.tasks.get(task or "")
        return state is not None and state.state == "RUNNING"

    def begun_since(self, said: CellState) -> bool:
        """Whether a state was written for it, not before it was submitted."""
        return said.since >= time.mktime(time.strptime(self.job.stamp[:15], "%Y%m%d-%H%M%S"))


def _status(out: Path, entry: Entry, total: int | None, given: _Given | None) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, sentence=entry.error or "")
    done, tasks = examples_done(out, entry), () if given is None else tuple(given.tasks)
    if is_complete(out, entry):
        total = done if entry.limit is None else min(done, entry.limit)
        return Status(entry, FINISHED, total, total, where=", ".join(tasks))
    living = {} if given is None else given.living
    said = read_states(out, entry.run_id)
    dead, owners = _owners(out / entry.run_id, said, given)
    if owners:
        where = ", ".join(owner.job or str(owner) for owner in owners)
        return Status(entry, RUNNING, done, total, _rate(said), where, jobs=tuple(living), owners=owners)
    failed = next((state for state in said.values() if state.state == "failed"), None)
    logs = out / SWEEP_FOLDER / "logs"
    over = given is not None and failed is not None and given.begun_since(failed)
    waiting = {task: state for task, state in living.items() if not (over and state.state == "RUNNING")}
    if waiting:
        task, state = next(iter(waiting.items()))
        where, log = ", ".join(waiting), str(logs / f"{task}.log")
        return Status(entry, QUEUED, done, total, where=where, sentence=state.about, log=log, jobs=tuple(living))
    if failed is not None:
        return Status(entry, FAILED, done, total, where=", ".join(tasks), sentence=failed.error or "", log=failed.log)
    if given is not None:
        task, ended = next(
            ((t, s) for t, s in given.tasks.items() if s is None or s.state != "COMPLETED"), (tasks[0], None)
        )
        became = f"job {task} {ended.sentence if ended else 'is gone, SLURM knows nothing of it'}"
        return Status(
            entry, FAILED, done, total, where=", ".join(tasks), sentence=became, log=str(logs / f"{task}.log")
        )
    return Status(entry, LEFT, done, total, sentence="" if dead is None else f"{dead} is gone")


def _owners(run: Path, said: Mapping[Path, CellState], given: _Given | None) -> tuple[Owner | None, tuple[Owner, ...]]:
    """Of all who claim a run or its shards: one that is gone, if any is, and those that live."""
    found = [owner for place in {run, *said} if (owner := owner_of(place)) is not None]
    living = [
        o for o in found if o.is_dead is not True and (o.job is None or (given is not None and given.runs(o.job)))
    ]
    return next((o for o in found if o not in living), None), tuple(sorted(living, key=str))


def _rate(said: Mapping[Path, CellState]) -> float | None:
    """Examples per second since the cell, or those of its shards that run, were begun last."""
    now, rate = time.time(), 0.0
    for place, state in said.items():
        if state.state == "running":
            done = len(indices(place / FILE_NAME) | indices(place / SHARD_FILE))
            rate += max(done - state.done, 0) / max(now - state.since, 1e-3)
    return rate or None


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
        table.add_row(s.entry.title, s.state, examples, rate, _duration(s.remaining), s.where + about)
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

"""The progress of the runs of a sweep, derived from its results folder and from submitit's jobs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.results.definition import Entry
from kvbench.results.locks import is_held
from kvbench.results.run_state import examples, is_complete, lines, read_state
from kvbench.sweeps.jobs import is_active, submitted

if TYPE_CHECKING:
    import submitit

FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "not finished"
ACTIVE = (RUNNING, QUEUED)


@dataclass(frozen=True)
class Status:
    """The progress of a run. total: None if it is unknown. job: its newest one, if it was submitted.

    complete: all examples are on disk, even if some of them failed. score: only of the results that `launch` returns.
    """

    entry: Entry
    state: str
    done: int = 0
    total: int | None = None
    error: str | None = None
    job: submitit.Job[None] | None = None
    complete: bool = False
    score: float | None = None


def statuses(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """The progress of every run, in the given order."""
    jobs = submitted(out)
    totals: dict[str, int] = {}
    for entry in entries:
        state = None if entry.run_id is None else read_state(out, entry.run_id)
        if state is not None and state.in_task is not None:
            totals[entry.group] = state.in_task
    return [_status(out, entry, jobs.get(entry.key), totals.get(entry.group)) for entry in entries]


def _status(out: Path, entry: Entry, job: submitit.Job[None] | None, in_task: int | None) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, error=entry.error)
    folder, state, complete = out / entry.run_id, read_state(out, entry.run_id), is_complete(out, entry)
    total = min((number for number in (in_task, entry.limit) if number is not None), default=None)
    word, error = LEFT, None
    if is_held(folder):
        word, complete = RUNNING, False
    elif complete:
        n, failed = examples(folder)
        word, error = (FAILED, f"{failed} of {n} examples failed, see {folder}") if failed else (FINISHED, None)
    elif job is not None and is_active(job):
        word = QUEUED
    elif state is not None and state.error is not None:
        word, error = FAILED, state.error
    elif job is not None:
        word, error = FAILED, f"job {job.job_id} ended ({job.state}), its log is {job.paths.stderr}"
    return Status(entry, word, lines(folder), total, error, job, complete)


def print_statuses(found: Sequence[Status]) -> None:
    """Print a line for each run, the errors, and the number of runs of each state."""
    width = max(len(one.entry.title) for one in found)
    for one in found:
        numbers = f"{one.done}/{'?' if one.total is None else one.total}"
        job = "" if one.job is None else f"  job {one.job.job_id}"
        sys.stdout.write(f"{one.entry.title:{width}}  {one.state:12}  {numbers:>9}{job}\n")
    for one in found:
        if one.error is not None:
            sys.stdout.write(f"{one.entry.title}: {one.error}\n")
    counts = Counter(one.state for one in found)
    listed = ", ".join(f"{counts[s]} {s}" for s in (FINISHED, RUNNING, QUEUED, FAILED, LEFT) if counts[s])
    sys.stdout.write(f"{len(found)} run{'s' * (len(found) != 1)}: {listed}\n")

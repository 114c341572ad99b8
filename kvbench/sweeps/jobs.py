"""Launches the runs of a sweep and follows them: computed in this process, or in jobs (`worker`).

torch and pandas are imported inside functions, because `kvbench sweep status` needs neither.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import ConfigError, UsageError, choice, counted, from_extra, whole_number
from kvbench.results.definition import (
    SWEEP_FOLDER,
    Definition,
    Entry,
    RunState,
    damaged_records,
    failed_examples,
    is_complete,
    lines,
    read_state,
    sweep_name,
    write_definition,
)
from kvbench.results.files import held, is_held
from kvbench.results.session import versions
from kvbench.sweeps.worker import STOP_SECONDS, Job, Submission, jobs_folder, start, submitted
from kvbench.terminal.command import write_message
from kvbench.terminal.escapes import visible

if TYPE_CHECKING:
    from kvbench.results.result import Result
    from kvbench.run.run import Run


POLL_SECONDS = 1.0
SIGNAL_SECONDS = 90
"""Seconds before the time limit at which submitit lets SLURM signal a job, which then stops."""
LEAST_MINUTES = 3
"""The smallest time limit on SLURM: 90 seconds to start and to compute, before the signal."""


@dataclass(frozen=True)
class Launcher:
    """Where the runs of a sweep are computed: the fields of conf/hydra/launcher/kvbench.yaml and slurm.yaml."""

    cluster: str | None = None  # None: this machine
    workers: int = 1
    wait: bool = True
    timeout_min: int = 60 * 24 * 30
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem_gb: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array_parallelism: int = 256
    setup: Sequence[str] = ()
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)
    max_num_timeout: int = 3
    jobs: int | None = None

    def __post_init__(self) -> None:
        choice("hydra.launcher.cluster", self.cluster, None, "slurm", "local")
        numbers = {"workers": 1, "jobs": 1, "timeout_min": 1, "cpus_per_task": 1, "array_parallelism": 1}
        for name, least in {**numbers, "gpus_per_node": 0, "mem_gb": 1, "max_num_timeout": 0}.items():
            if getattr(self, name) is not None:
                whole_number(f"hydra.launcher.{name}", getattr(self, name), least)
        if self.cluster == "slurm":
            with from_extra("slurm", "hydra/launcher=slurm"):
                import_module("submitit")
        if self.cluster == "slurm" and self.timeout_min < LEAST_MINUTES:
            why = (
                f"leaves no time to work, because a job stops {SIGNAL_SECONDS} seconds before its time limit: "
                f"{LEAST_MINUTES} is the smallest that works"
            )
            raise ConfigError("hydra.launcher.timeout_min", self.timeout_min, why=why)

    @property
    def in_process(self) -> bool:
        """Whether the runs are computed in this process."""
        return self.cluster is None and self.workers == 1

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields as `submitit.AutoExecutor` names them, without unset ones, which the cluster decides."""
        found = {name: getattr(self, name) for name in ("cpus_per_task", "gpus_per_node", "mem_gb", "timeout_min")}
        names = ("partition", "account", "qos", "array_parallelism", "setup", "additional_parameters")
        found |= {f"slurm_{name}": getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value not in (None, (), [], {})}


def submit(out: Path, name: str, entries: Sequence[Entry], launcher: Launcher) -> list[Job]:
    """Submit the runs in jobs: one for each model and task or `jobs` with a cluster, else one for each worker."""
    out = out.resolve()
    groups = grouped(entries, launcher.jobs if launcher.cluster else launcher.workers)
    gpus = _gpus() if launcher.cluster is None else []
    threads = max(1, (os.cpu_count() or 1) // len(groups)) if launcher.cluster is None and not gpus else None
    works = [Submission(out, tuple(entry.key for entry in group), threads) for group in groups]
    folder = jobs_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    submission = 1 + max((job.submission for job in submitted(out).values()), default=0)
    if launcher.cluster != "slurm":
        found = []
        for number, work in enumerate(works):
            gpu = gpus[number % len(gpus)] if gpus else None
            attached, restarts = launcher.cluster is None, launcher.max_num_timeout
            found.append(start(work, launcher.timeout_min, restarts, attached, gpu, submission))
        return found
    import submitit

    executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=launcher.max_num_timeout)
    executor.update_parameters(name=name, **launcher.parameters)
    ids = [job.job_id for job in executor.submit_array(works)]
    jobs = [Job(folder, number, "slurm", work.keys, name, submission) for number, work in zip(ids, works, strict=True)]
    for job in jobs:
        job.write()
    return jobs


def grouped(entries: Sequence[Entry], number: int | None) -> list[list[Entry]]:
    """The runs in groups that share prefills, or in `number` groups of about equal size."""
    shared: dict[str, list[Entry]] = {}
    for entry in entries:
        shared.setdefault(entry.group, []).append(entry)
    if number is None:
        return list(shared.values())
    ordered = [entry for group in shared.values() for entry in group]
    number = min(number, len(ordered))
    ends = [round(len(ordered) * place / number) for place in range(number + 1)]
    return [ordered[start:end] for start, end in pairwise(ends)]


def _gpus() -> list[int]:
    """The numbers of the CUDA devices of this process."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given and all(word.isdecimal() for word in given.split(",")):
        return [int(word) for word in given.split(",")]
    return list(range(torch.cuda.device_count()))


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
    job: Job | None = None
    complete: bool = False
    score: float | None = None


def statuses(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """The progress of every run, in the given order."""
    jobs = submitted(out)
    states = [None if entry.run_id is None else read_state(out, entry.run_id) for entry in entries]
    groups = [entry.group for entry in entries]
    totals = {
        group: state.in_task
        for group, state in zip(groups, states, strict=True)
        if state is not None and state.in_task is not None
    }
    each = zip(entries, groups, states, strict=True)
    return [_status(out, entry, state, jobs.get(entry.key), totals.get(group)) for entry, group, state in each]


def _status(out: Path, entry: Entry, state: RunState | None, job: Job | None, in_task: int | None) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, error=entry.error)
    folder, complete = out / entry.run_id, is_complete(out, entry, state)
    done, total = lines(folder), min((number for number in (in_task, entry.limit) if number is not None), default=None)
    total = None if total is None else max(total, done)  # an earlier command may have had a larger limit
    word, error = LEFT, None
    if is_held(folder):
        word, complete = RUNNING, False
    elif complete:
        error = failed_examples(folder)
        word = FINISHED if error is None else FAILED
    elif job is not None and job.active:
        word = QUEUED
    elif state is not None and state.error is not None:
        word, error = FAILED, state.error
    elif job is not None:
        word, error = FAILED, f"{job.ending}; `kvbench sweep resume {out}` continues the run"
    return Status(entry, word, done, total, error, job, complete)


def print_statuses(found: Sequence[Status]) -> None:
    """Print a line for each run, the errors, and the number of runs of each state."""
    titles = [visible(str(one.entry.title)) for one in found]
    width = max(map(len, titles), default=0)
    for one, title in zip(found, titles, strict=True):
        numbers = f"{one.done}/{'?' if one.total is None else one.total}"
        job = "" if one.job is None else f"  job {one.job.id}"
        sys.stdout.write(f"{title:{width}}  {one.state:12}  {numbers:>9}{job}\n")
    for one, title in zip(found, titles, strict=True):
        if one.error is not None:
            sys.stdout.write(f"{title}: {visible(str(one.error))}\n")
    counts = Counter(one.state for one in found)
    listed = ", ".join(f"{counts[s]} {s}" for s in (FINISHED, RUNNING, QUEUED, FAILED, LEFT) if counts[s])
    sys.stdout.write(f"{counted(len(found), 'run')}: {listed}\n")


# --- launching -------------------------------------------------------------------------------------------------------
def run_sweep(
    given: Sequence[Entry], folders: Sequence[Path], experiment: str | None, command: str, launcher: Launcher
) -> list[Status]:
    """Compute or submit the runs of a sweep and print their table; the status of each configuration, in order.

    given: the configurations. folders: of the user's configurations.
    """
    from kvbench.run.run import out_folder
    from kvbench.sweeps.compute import is_dry, plan, print_plan

    out = out_folder(_same("out", given))
    _same("logger", given)
    planned, runs = plan(given, folders, elsewhere=launcher.cluster == "slurm")
    entries = tuple({entry.key: entry for entry in planned}.values())
    if any(is_dry(entry) for entry in given):
        print_plan(entries, runs)
        found = [Status(entry, FINISHED) for entry in entries]
    else:
        sweep = Definition(sweep_name(out, experiment), (command,), vars(launcher), versions(), entries)
        found = launch(out, entries, runs, write_definition(out, sweep), launcher)
    by_key = {status.entry.key: status for status in found}
    return [by_key[entry.key] for entry in planned]


def _same(name: str, entries: Sequence[Entry]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value that all configurations of a sweep must share. Raises UsageError."""
    values = [entry.config[name] for entry in entries]
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all runs of a sweep")
    return values[0]


def launch(
    out: Path, entries: Sequence[Entry], runs: Mapping[str, Run], sweep: Definition, launcher: Launcher
) -> list[Status]:
    """Compute or submit planned runs of a sweep; a run that fails does not stop the others.

    runs: by the keys of their entries; jobs build them again.
    """
    if launcher.in_process:
        from kvbench.sweeps.compute import Guarded, compute, make_watch

        tracker = make_watch(entries[0].config["logger"], sweep.name)
        try:
            compute(entries, runs, out, tracker)
        except KeyboardInterrupt:
            print_results(out, entries)
            raise
        finally:
            tracked = statuses(out, sweep.runs) if isinstance(tracker, Guarded) else ()
            tracker.close([result for one in tracked if (result := _result(out, one)) is not None])
        return print_results(out, entries)
    jobs = _submit(out, entries, sweep.name, launcher)
    if launcher.wait:
        try:
            return wait(out, entries)
        except KeyboardInterrupt:
            if launcher.cluster is None:  # the workers belong to this command
                stop(jobs)
                print_results(out, entries)
            raise
    return [Status(entry, FINISHED, error=entry.error) for entry in entries]


def _submit(out: Path, entries: Sequence[Entry], name: str, launcher: Launcher) -> list[Job]:
    """Submit the runs that are neither complete nor queued nor running."""
    with held(out / SWEEP_FOLDER, wait=True):  # of two commands, the second one sees the jobs of the first
        found = [one for one in statuses(out, entries) if one.entry.run_id and one.state not in ACTIVE]
        left = [one.entry for one in found if not one.complete or damaged_records(out / one.entry.key)]
        jobs = submit(out, name, left, launcher) if left else []
    if not left:
        write_message("nothing to submit: all runs are complete, queued or running")
        return []
    ids = ", ".join(job.id for job in jobs)
    sys.stdout.write(f"submitted {counted(len(left), 'run')} in {counted(len(jobs), 'job')}: {ids}\n")
    if not launcher.wait:
        sys.stdout.write(f"kvbench sweep status {out}\nkvbench sweep wait {out}\n")
    return jobs


def stop(jobs: Sequence[Job]) -> list[Job]:
    """Cancel jobs and wait for those of this machine to end; returns the ones that still run."""
    for job in jobs:
        job.cancel()
    end = time.monotonic() + STOP_SECONDS
    local = [job for job in jobs if job.cluster == "local"]
    while time.monotonic() < end and any(job.active for job in local):
        time.sleep(0.1)
    return [job for job in local if job.active]


def wait(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Wait until no job of these runs is queued or running, and print errors and the table."""
    keys = {entry.key for entry in entries}
    jobs = {job.id: job for key, job in submitted(out).items() if key in keys}
    while any(job.active for job in jobs.values()):
        time.sleep(POLL_SECONDS)
    found = print_results(out, entries)
    for status in found:
        if status.error is not None:
            write_message(f"{status.entry.title}: {status.error}")
    return found


def _result(out: Path, status: Status) -> Result | None:
    """The result of a complete run; None, with a message, if its files cannot be read."""
    from kvbench.results.loading import read_result

    if not status.complete:
        return None
    try:
        return read_result(out / status.entry.key)
    except UsageError as error:
        write_message(str(error))
        return None


def print_results(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Print the table of all complete runs; the status of each run, with its score, or the reason why it has none."""
    found, results = [], []
    for status in statuses(out, entries):
        if (result := _result(out, status)) is not None:
            results.append(result)
            status = replace(status, score=result.value)
        elif status.error is None:
            word = "is computed by another process" if status.state in ACTIVE else "is not finished"
            status = replace(status, error=f"the run {word}; the same command continues it")
        found.append(status)
    if results:
        from kvbench.report.table import print_table  # pandas

        print_table(results)
    if len(results) > 1:
        sys.stdout.write(f"results: {out}\n")
    sys.stdout.flush()
    return found

"""Launches the runs of a sweep and follows them: computed in this process, or in jobs, through submitit.

A job is a group of runs that another process computes, on this machine or on SLURM. torch and pandas are imported
inside functions, because `kvbench sweep status` needs neither.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UsageError, choice, whole_number
from kvbench.results.definition import (
    SWEEP_FOLDER,
    Definition,
    Entry,
    failed_examples,
    is_complete,
    lines,
    read_definition,
    read_state,
    sweep_name,
    write_definition,
)
from kvbench.results.files import is_held
from kvbench.results.session import versions
from kvbench.terminal.command import quiet, share_cores, write_message

if TYPE_CHECKING:
    import submitit

    from kvbench.sweeps.compute import Composed, Planned


JOBS = "jobs"
POLL_SECONDS = 1.0
NO_PROCESS = "NO PROCESS AND NO RESULT"
"""submitit's state of a local job that another process started."""


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
        whole_number("hydra.launcher.workers", self.workers, 1)
        if self.jobs is not None:
            whole_number("hydra.launcher.jobs", self.jobs, 1)

    @property
    def in_process(self) -> bool:
        """Whether the runs are computed in this process."""
        return self.cluster is None and self.workers == 1

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields as `submitit.AutoExecutor` names them, without unset ones, which the cluster decides."""
        found = {name: getattr(self, name) for name in ("cpus_per_task", "gpus_per_node", "mem_gb", "timeout_min")}
        names = ("partition", "account", "qos", "array_parallelism", "setup", "additional_parameters")
        if self.cluster == "slurm":
            found |= {f"slurm_{name}": getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value not in (None, (), [], {})}


class Job:
    """Some runs of the sweep in `out`, by their keys. submitit pickles it and calls it in another process."""

    def __init__(self, out: Path, keys: Sequence[str], cluster: str, threads: int | None = None) -> None:
        self.out, self.keys, self.cluster, self.threads = out, tuple(keys), cluster, threads

    def __call__(self) -> None:
        """Compute the missing examples. Raises RuntimeError if a run failed, so that SLURM reports a failed job."""
        share_cores()
        quiet()
        definition = read_definition(self.out)
        os.chdir(definition.folder)  # the paths in its runs are relative to it
        sys.path.insert(0, definition.folder)  # so are the user's own modules, as under `python -m`
        import torch

        from kvbench.sweeps.compute import compute, make_watch, rebuilt

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        entries = [entry for entry in definition.runs if entry.key in self.keys]
        tracker = make_watch(entries[0].config["logger"], definition.name)
        try:
            failed = compute([rebuilt(entry, self.out) for entry in entries], self.out, tracker)
        finally:
            tracker.close()
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(entries)} runs failed: {failed[0]}")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What SLURM runs after a preemption or a time limit: the same job, which continues with the next example."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def submit(out: Path, name: str, entries: Sequence[Entry], launcher: Launcher) -> list[submitit.Job[None]]:
    """Submit the runs in jobs: one for each model and task or `jobs` with a cluster, else one for each worker."""
    import submitit

    cluster, out = launcher.cluster or "local", out.resolve()
    groups = grouped(entries, launcher.jobs if launcher.cluster else launcher.workers)
    gpus = _gpus() if launcher.cluster is None else []
    threads = max(1, (os.cpu_count() or 1) // len(groups)) if launcher.cluster is None and not gpus else None
    jobs = [Job(out, [entry.key for entry in group], cluster, threads) for group in groups]
    own = {"slurm_max_num_timeout": launcher.max_num_timeout} if cluster == "slurm" else {}
    executor = submitit.AutoExecutor(out / SWEEP_FOLDER / JOBS, cluster=cluster, **own)
    executor.update_parameters(name=name, **launcher.parameters)
    if cluster == "slurm":
        return executor.submit_array(jobs)
    started = []
    for number, job in enumerate(jobs):
        if gpus:
            executor.update_parameters(gpus_per_node=1, local_visible_gpus=[gpus[number % len(gpus)]])
        started.append(executor.submit(job))
    return started


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


def submitted(out: Path) -> dict[str, submitit.Job[None]]:
    """The newest job of each submitted run of a sweep, by the keys of the runs."""
    folder = out.resolve() / SWEEP_FOLDER / JOBS
    if not folder.exists():
        return {}
    import submitit

    found: dict[str, submitit.Job[None]] = {}
    for path in sorted(folder.glob("*_submitted.pkl"), key=lambda path: path.stat().st_mtime_ns):
        job: Any = submitit.core.utils.DelayedSubmission.load(path).function
        kind = submitit.SlurmJob if job.cluster == "slurm" else submitit.LocalJob
        found |= dict.fromkeys(job.keys, kind(folder, path.name.removesuffix("_submitted.pkl")))
    return found


def is_active(job: submitit.Job[None]) -> bool:
    """Whether a job is queued or running. The id of a local job is the number of its process."""
    return Path(f"/proc/{job.job_id}").exists() if job.state == NO_PROCESS else not job.done()


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
        error = failed_examples(folder)
        word = FINISHED if error is None else FAILED
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


# --- launching -------------------------------------------------------------------------------------------------------
def run_sweep(composed: Sequence[Composed], command: str, launcher: Launcher) -> list[Status]:
    """Compute or submit the runs of a sweep and print their table; the status of each configuration, in order."""
    from kvbench.run.run import out_folder
    from kvbench.sweeps.compute import plan, print_plan

    out = out_folder(_same("out", composed))
    _same("logger", composed)
    runs, keys = plan(composed, elsewhere=launcher.cluster == "slurm")
    if any(one.config["dry_run"] is True for one in composed):
        print_plan(runs)
        found = [Status(one.entry, FINISHED) for one in runs]
    else:
        name = sweep_name(out, composed[0].choices.get("experiment"))
        entries = tuple(one.entry for one in runs)
        sweep = Definition(name, (command,), str(Path.cwd()), vars(launcher), versions(), entries)
        found = launch(out, runs, write_definition(out, sweep), launcher)
    by_key = {status.entry.key: status for status in found}
    return [by_key[key] for key in keys]


def _same(name: str, composed: Sequence[Composed]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value that all configurations of a sweep must share. Raises UsageError."""
    values = [one.config[name] for one in composed]
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all runs of a sweep")
    return values[0]


def launch(out: Path, runs: Sequence[Planned], sweep: Definition, launcher: Launcher) -> list[Status]:
    """Compute or submit planned runs of a sweep; a run that fails does not stop the others."""
    entries = [one.entry for one in runs]
    if launcher.in_process:
        from kvbench.results.result import read_result
        from kvbench.sweeps.compute import NoLogger, compute, make_watch

        tracker = make_watch(entries[0].config["logger"], sweep.name)
        try:
            compute(runs, out, tracker)
        except KeyboardInterrupt:
            print_results(out, entries)
            raise
        finally:
            tracked = () if isinstance(tracker, NoLogger) else statuses(out, sweep.runs)
            tracker.close([read_result(out / one.entry.key, one.entry.limit) for one in tracked if one.complete])
        return print_results(out, entries)
    _submit(out, entries, sweep.name, launcher)
    if launcher.wait:
        return wait(out, entries)
    return [Status(entry, FINISHED, error=entry.error) for entry in entries]


def _submit(out: Path, entries: Sequence[Entry], name: str, launcher: Launcher) -> None:
    """Submit the runs that are neither complete nor queued nor running."""
    found = [one for one in statuses(out, entries) if not one.complete and one.state not in ACTIVE]
    left = [one.entry for one in found if one.entry.run_id]
    if not left:
        write_message("nothing to submit: all runs are complete, queued or running")
        return
    jobs = submit(out, name, left, launcher)
    ids = ", ".join(job.job_id for job in jobs)
    sys.stdout.write(f"submitted {len(left)} runs in {len(jobs)} jobs: {ids}\n")
    if not launcher.wait:
        sys.stdout.write(f"kvbench sweep status {out}\nkvbench sweep wait {out}\n")


def wait(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Wait until no job of these runs is queued or running, and print errors and the table."""
    keys = {entry.key for entry in entries}
    jobs = {job.job_id: job for key, job in submitted(out).items() if key in keys}
    while any(is_active(job) for job in jobs.values()):
        time.sleep(POLL_SECONDS)
    found = print_results(out, entries)
    for status in found:
        if status.error is not None:
            write_message(f"{status.entry.title}: {status.error}")
    return found


def print_results(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Print the table of all complete runs; the status of each run, with its score, or the reason why it has none."""
    from kvbench.results.result import read_result

    found, results = [], []
    for status in statuses(out, entries):
        if status.complete:
            results.append(read_result(out / status.entry.key, status.entry.limit))
            status = replace(status, score=results[-1].value)
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

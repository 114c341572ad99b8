"""What SLURM says of jobs: squeue of those that wait or run, sacct of those that have ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.terminal.errors import UsageError

UNKNOWN = "UNKNOWN"
"""The state of a task while squeue does not answer and sacct knows nothing of it: it may well wait or run."""
LIVE = (
    UNKNOWN,
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SUSPENDED",
    "RESIZING",
    "SIGNALING",
)
_ASK_SECONDS = 20


@dataclass(frozen=True)
class JobState:
    """One array task: its state in SLURM's words, and why it waits, or its exit code."""

    state: str
    about: str = ""

    @property
    def lives(self) -> bool:
        """Whether it waits or runs."""
        return self.state in LIVE

    @property
    def sentence(self) -> str:
        """What became of it."""
        code = f", exit code {self.about}" if self.about else ""
        return f"ended as {self.state}{code}"


def job_states(tasks: Sequence[str]) -> dict[str, JobState]:
    """The state of those of these array tasks ("12_3") that SLURM still knows; of all where squeue does not answer."""
    if not tasks:
        return {}
    arrays = ",".join(dict.fromkeys(task.partition("_")[0] for task in tasks))
    found = {}
    for line in _ask("sacct", "-n", "-P", "-X", "-j", arrays, "-o", "JobID,State,ExitCode") or []:
        task, state, code = [*line.split("|"), "", ""][:3]
        found[task] = JobState(state.split(" ")[0], code.removeprefix("0:0"))  # "CANCELLED by 0"
    waiting = _ask("squeue", "-h", "-r", "-t", "all", "-j", arrays, "-o", "%F_%K|%T|%r")
    if waiting is None:
        return {**dict.fromkeys(tasks, JobState(UNKNOWN, "squeue does not answer")), **found}
    for line in waiting:
        task, state, reason = [*line.split("|"), "", ""][:3]
        if state in LIVE or task not in found:
            found[task] = JobState(state, reason if state == "PENDING" else "")
    return found


def here() -> str | None:
    """The array task this process is: "12_3"; None where it is no job."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return None if array is None or task is None else f"{array}_{task}"


def was_preempted(task: str) -> bool:
    """Whether a running job has to make room for another one."""
    told = " ".join(_ask("scontrol", "show", "job", task) or [])
    when = re.search(r"PreemptTime=(\S+)", told)
    return "JobState=RUNNING" in told and when is not None and when[1] not in ("None", "Unknown")


def requeue(task: str) -> bool:
    """Send a job back to the queue; False where SLURM would not."""
    try:
        return subprocess.run(["scontrol", "requeue", task], check=False, timeout=_ASK_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def cancel(tasks: Sequence[str]) -> None:
    """End jobs, waiting or running. Raises UsageError with what SLURM says against it."""
    try:
        done = subprocess.run(["scancel", *tasks], capture_output=True, text=True, check=False, timeout=_ASK_SECONDS)
        said = one_line(done.stderr) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise UsageError(f"scancel did not end all jobs: {said}")


def one_line(said: str) -> str:
    """What a command of SLURM says on stderr, without "sbatch: error:" before each of its lines."""
    return " ".join(re.sub(r"^\w+: (error: )?", "", line) for line in said.strip().splitlines())


def _ask(*command: str) -> list[str] | None:
    """The lines a command of SLURM prints: none of jobs long gone, nor without SLURM; None where it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return []
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return done.stdout.splitlines()

"""`launcher=slurm`: one array of jobs whose tasks each compute a share; nothing here has to stay alive for them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kvbench.engine.run_writer import tidy
from kvbench.policies.checks import whole_number
from kvbench.records.definition import Definition, Entry
from kvbench.sweeps.follow import wait_for
from kvbench.sweeps.jobs import LOGS, Job, write_job
from kvbench.sweeps.launcher import Launcher, Sweep
from kvbench.sweeps.outcome import exit_code
from kvbench.sweeps.queue import one_line
from kvbench.sweeps.shares import check_shards, cut, new_stamp, pieces, share_path, write_share
from kvbench.sweeps.status import FINISHED, retried
from kvbench.terminal.command import say
from kvbench.terminal.errors import UsageError

GRACE_SECONDS = 120
"""So long before the time limit a job is told, to finish its example and go back to the queue."""

_UNTIL_PYTHON_LISTENS = "trap '' USR1"  # what is ignored stays so when Python takes the shell's place


@dataclass(frozen=True)
class Slurm(Launcher):
    """SLURM jobs; the fields are explained in conf/launcher/slurm.yaml."""

    elsewhere: ClassVar[bool] = True

    jobs: int | None = None
    shards: int = 1
    wait: bool = False
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int = 1
    cpus_per_task: int = 8
    mem_gb: float | None = 64
    timeout_min: int = 240
    array_parallelism: int | None = None
    requeue: bool = True
    setup: Sequence[str] = field(default_factory=tuple)
    sbatch: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for name, least in (("cpus_per_task", 1), ("timeout_min", 1), ("gpus_per_node", 0)):
            whole_number(f"launcher.{name}", getattr(self, name), least)
        check_shards(self.shards)
        for name in ("jobs", "array_parallelism"):
            if getattr(self, name) is not None:
                whole_number(f"launcher.{name}", getattr(self, name), 1)
        if self.mem_gb is not None and self.mem_gb <= 0:
            raise ValueError(f"launcher.mem_gb={self.mem_gb} must be above 0")
        for name in ("setup", "sbatch"):
            lines = getattr(self, name)
            if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
                raise ValueError(f"launcher.{name}={lines!r} must be a list of texts: launcher.{name}=['...']")

    def launch(self, sweep: Sweep) -> int:
        """Submit what is neither finished nor queued; wait for it where that was asked for."""
        assert sweep.definition is not None
        known = {status.entry.key: status for status in retried(sweep.out, sweep.definition)}
        mine = [known[p.entry.key] for p in sweep.planned]
        left = [s.entry for s in mine if s.is_open]
        finished = [s.entry for s in mine if s.state == FINISHED or s.broke]
        for entry in finished:
            tidy(sweep.out / entry.key)
        wrong = [s.entry.code for s in mine if s.entry.error is not None]
        busy = len(mine) - len(left) - len(finished) - len(wrong)
        if left:
            _tell(sweep.out, self._submit(sweep.out, sweep.definition, left), len(left), len(finished), busy)
        else:
            say(f"nothing to submit: {len(finished)} of {len(mine)} cells are finished, {busy} are queued or running")
        if not self.wait:
            return exit_code(wrong)
        return wait_for(sweep.out, [s.entry for s in mine], sweep.shows)

    def _submit(self, out: Path, definition: Definition, entries: Sequence[Entry]) -> Job:
        stamp = new_stamp()
        shares = cut(pieces(entries, self.shards), self.jobs)
        for number, share in enumerate(shares):
            write_share(out, f"{stamp}-{number}", share, self.gpus_per_node)
        name, folder = f"kvbench-{definition.name}", Path(definition.folder)
        try:
            job = Job(_sbatch(self.script(out.resolve(), name, stamp, len(shares), folder)), stamp, len(shares))
        except UsageError:
            for number in range(len(shares)):
                share_path(out, f"{stamp}-{number}").unlink()
            raise
        write_job(out, job)
        return job

    def script(self, out: Path, name: str, stamp: str, tasks: int, folder: Path) -> str:
        """What sbatch is given. Python takes the shell's place, so that SLURM's signals reach it."""
        logs = out / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        at_once = "" if self.array_parallelism is None else f"%{self.array_parallelism}"
        options = {
            "job-name": name,
            "array": f"0-{tasks - 1}{at_once}",
            "output": f"{str(logs).replace('%', '%%')}/%A_%a.log",
            "open-mode": "append",
            "chdir": str(folder),
            "time": str(self.timeout_min),
            "cpus-per-task": str(self.cpus_per_task),
            "nodes": "1",
            "ntasks": "1",
            "signal": f"B:USR1@{min(GRACE_SECONDS, 30 * self.timeout_min)}",
            "partition": self.partition,
            "account": self.account,
            "mem": None if self.mem_gb is None else f"{round(self.mem_gb * 1024)}M",
            "gpus-per-node": str(self.gpus_per_node) if self.gpus_per_node else None,
        }
        lines = [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]
        lines += ["#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue"]
        lines += [f"#SBATCH {option}" for option in self.sbatch]
        log = f"{shlex.quote(str(logs))}/${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}.log"
        share = f'{stamp}-"$SLURM_ARRAY_TASK_ID" --log {log}{" --requeue" if self.requeue else ""}'
        work = f"exec {shlex.quote(sys.executable)} -m kvbench.sweep work {shlex.quote(str(out))} --share {share}"
        return "\n".join(["#!/bin/bash", *lines, _UNTIL_PYTHON_LISTENS, *self.setup, work, ""])


def _tell(out: Path, job: Job, cells: int, finished: int, busy: int) -> None:
    """Say what was submitted, where its logs are, and how it is followed; finished, busy: cells that were not."""
    before = [f"{finished} finished already"] * (finished > 0) + [f"{busy} queued or running already"] * (busy > 0)
    beside = f" ({', '.join(before)})" if before else ""
    tasks = f"{job.tasks} job{'s' * (job.tasks > 1)}"
    sys.stdout.write(
        f"submitted: array {job.array}, {tasks}, {cells} cell{'s' * (cells > 1)}{beside}\n"
        f"logs: {out / LOGS}/{job.array}_*.log\n"
        f"python -m kvbench.sweep status {shlex.quote(str(out))}\n"
        f"python -m kvbench.sweep wait {shlex.quote(str(out))}\n"
    )
    sys.stdout.flush()


def _sbatch(script: str) -> str:
    """Submit a script and return the number of its array. Raises UsageError with what SLURM says against it."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("launcher=slurm needs SLURM's sbatch, which is not on this machine: launcher=local") from None
    if done.returncode != 0:
        said = one_line(done.stderr)
        raise UsageError(f"sbatch refused the jobs: {said} (see launcher.partition, gpus_per_node, cpus_per_task, ...)")
    return done.stdout.strip().split(";")[0]

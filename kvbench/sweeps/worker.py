"""Jobs: groups of runs that another process computes, on this machine or on SLURM.

A job has a record in `.sweep/jobs`, `<id>.json`. A job of this machine holds the lock `<id>.lock` while it lives, and
stops when it finds the file `<id>.cancel`: a process id may since belong to another process. Records are JSON, because
reading the folder of somebody else must not run code.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvbench.errors import counted, from_extra
from kvbench.results.definition import SWEEP_FOLDER, read_definition
from kvbench.results.files import is_locked, read_json, write_json
from kvbench.terminal.command import log_to_stderr, quiet, share_cores, sigterm_as_interrupt

if TYPE_CHECKING:
    import submitit

POLL_SECONDS = 0.5
STOP_SECONDS = 120.0
"""A process that was told to stop and still lives after this time is killed, so that it frees its locks."""

log = logging.getLogger(__name__)


class TimeLimit(KeyboardInterrupt):
    """The time limit of the job, or its preemption: no error of a run, so `except Exception` does not catch it."""


@dataclass(frozen=True)
class Job:
    """The record of a job. folder: `.sweep/jobs`. name: of the SLURM job. submission: its number, a later one is newer.

    Times of files do not order jobs, because a clock may be set back.
    """

    folder: Path
    id: str
    cluster: str
    keys: tuple[str, ...]
    name: str = ""
    submission: int = 0

    def write(self, **others: object) -> None:
        """Write the record. others: further values."""
        known = {"cluster": self.cluster, "keys": list(self.keys), "name": self.name, "submission": self.submission}
        values = {**known, **others}
        write_json(self.folder / f"{self.id}.json", values)

    @property
    def active(self) -> bool:
        """Whether the job is queued or running."""
        return not self._slurm.done() if self.cluster == "slurm" else is_locked(self.folder / f"{self.id}.lock")

    @property
    def ending(self) -> str:
        """How it ended, for a message about a run that is not complete."""
        if self.cluster == "slurm":
            return f"job {self.id} ended ({self._slurm.state}), its log is {self._slurm.paths.stderr}"
        return f"job {self.id} ended, its log is {self.folder / self.id}.log"

    def cancel(self) -> None:
        """Tell the job to stop."""
        if self.cluster == "slurm":  # by its name too: after a reset of SLURM the id may be that of another job
            subprocess.run(["scancel", f"--name={self.name}", self.id], check=False)
        else:
            (self.folder / f"{self.id}.cancel").touch()

    @property
    def _slurm(self) -> submitit.SlurmJob[None]:
        with from_extra("slurm", "a job of SLURM"):
            import submitit

        return submitit.SlurmJob(self.folder, self.id)


def jobs_folder(out: Path) -> Path:
    """The folder of the records and logs of a sweep's jobs."""
    return out.resolve() / SWEEP_FOLDER / "jobs"


def submitted(out: Path) -> dict[str, Job]:
    """The newest job of each submitted run of a sweep, by the keys of the runs. A record that is damaged is ignored."""
    folder = jobs_folder(out)
    jobs: list[Job] = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime_ns):
        try:
            values = read_json(path)
            job = Job(
                *(folder, path.stem, values["cluster"], tuple(map(str, values["keys"]))),
                *(str(values.get("name", "")), int(values.get("submission", 0))),
            )
            if not re.fullmatch(r"\w[\w-]*", job.id) or job.cluster not in ("slurm", "local"):
                raise ValueError("not a job")
            jobs.append(job)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is ignored: %s", path, error)
    return {key: job for job in sorted(jobs, key=lambda job: job.submission) for key in job.keys}


# --- starting ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Submission:
    """Some runs of the sweep in `out`, by their keys. submitit pickles it and calls it in another process."""

    out: Path
    keys: tuple[str, ...]
    threads: int | None = None

    def __call__(self) -> None:
        """Compute the missing examples. Raises RuntimeError if a run failed, so that SLURM reports a failed job."""
        with _limited() as limit:
            try:
                self.compute()
            except TimeLimit:
                if limit.exit is not None:  # the job is queued again
                    raise limit.exit from None
                raise RuntimeError(self.at_limit) from None

    @property
    def at_limit(self) -> str:
        """The message of a job that is not queued again."""
        return (
            "the job met its time limit; examples on disk are kept. To continue: kvbench sweep resume "
            f"{self.out} (with more time: hydra.launcher.timeout_min=...)"
        )

    def compute(self) -> None:
        """Compute the missing examples, and raise RuntimeError if a run failed."""
        share_cores()
        quiet()
        definition = read_definition(self.out)
        import torch

        from kvbench.sweeps.compute import compute, make_watch, rebuilt

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        entries = [entry for entry in definition.runs if entry.key in self.keys]
        with entries[0].working_folder():
            tracker = make_watch(entries[0].config["logger"], definition.name)
        try:
            runs = {entry.key: rebuilt(entry, self.out) for entry in entries}
            failed = compute(entries, runs, self.out, tracker)
        finally:
            tracker.close()
        if failed:
            raise RuntimeError(f"{len(failed)} of {counted(len(entries), 'run')} failed: {failed[0]}")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What SLURM runs after a preemption or a time limit: the same job, which continues where it stopped."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class _Limit:
    """exit: the SystemExit with which submitit ends a job that it has queued again."""

    exit: SystemExit | None = None


@contextmanager
def _limited() -> Iterator[_Limit]:
    """Let submitit's handler of the time limit end the job with `TimeLimit`.

    The handler raises an ordinary error inside whatever the job computes, which would become the error of a run.
    """
    import submitit

    number = submitit.JobEnvironment._usr_sig()
    handler: Any = signal.getsignal(number)
    limit = _Limit()

    def stop(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except SystemExit as error:
            limit.exit = error
        except Exception as error:
            log.warning("%s", error)
        raise TimeLimit

    signal.signal(number, stop)
    try:
        yield limit
    finally:
        signal.signal(number, handler)


def start(
    work: Submission, minutes: float, restarts: int, attached: bool, gpu: int | None = None, submission: int = 0
) -> Job:
    """Start a job on this machine. attached: it stops when this process ends. gpu: the only one that it sees."""
    job = Job(jobs_folder(work.out), f"local-{secrets.token_hex(4)}", "local", work.keys, submission=submission)
    client = os.getpid() if attached else None
    job.write(out=str(work.out), threads=work.threads, seconds=60 * minutes, client=client)
    place = str(job.folder / job.id)
    environment = dict(os.environ) if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    with open(f"{place}.lock", "wb") as lock, open(f"{place}.log", "ab") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the job inherits the open file and with it the lock
        subprocess.Popen(
            [sys.executable, "-m", "kvbench.sweeps.worker", place, str(restarts), str(lock.fileno())],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(lock.fileno(),),
            start_new_session=True,
        )  # fmt: skip
    return job


# --- the process of a job on this machine ----------------------------------------------------------------------------
def main() -> int:
    """Compute the runs of a job: see `start`."""
    place, restarts, lock = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fcntl.flock(lock, fcntl.LOCK_EX)  # on NFS a lock is not inherited
    record = json.loads(Path(f"{place}.json").read_text(encoding="utf-8"))
    work = Submission(Path(record["out"]), tuple(record["keys"]), record["threads"])
    log_to_stderr()

    def at_limit(number: int, frame: FrameType | None) -> None:
        raise TimeLimit

    signal.signal(signal.SIGALRM, at_limit)
    signal.setitimer(signal.ITIMER_REAL, record["seconds"])
    threading.Thread(target=_watch, args=(Path(f"{place}.cancel"), record["client"]), daemon=True).start()
    try:
        with sigterm_as_interrupt():
            work.compute()
    except TimeLimit:
        if restarts:
            os.set_inheritable(lock, True)
            again = [sys.executable, "-m", "kvbench.sweeps.worker", place, str(restarts - 1), str(lock)]
            os.execv(sys.executable, again)
        log.error("%s", work.at_limit)
        return 1
    except KeyboardInterrupt:
        log.warning("the job was stopped; examples on disk are kept")
        return 1
    return 0


def _watch(cancel: Path, client: int | None) -> None:
    """Stop this process when its job is cancelled, or when the client that it belongs to has ended."""
    while not cancel.exists() and (client is None or os.getppid() == client):
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

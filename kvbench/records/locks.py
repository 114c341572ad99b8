"""A lock on a run's folder, so that two processes never compute the same run.

The lock is flock on the file `.lock`, whose text names the holder. The system releases it when the process ends,
however that ends. A stopped process still holds it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import BinaryIO

_NAME = ".lock"
_AGAIN_SECONDS = 0.1

log = logging.getLogger(__name__)


class RunBusyError(RuntimeError):
    """Another process is computing this run: `holder(folder)` says whether it still is."""

    def __init__(self, sentence: str, folder: Path) -> None:
        super().__init__(sentence)
        self.folder = folder


class RunLostError(RuntimeError):
    """The file or the lock of this run was deleted, replaced or changed while it was computed."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock. world: names the processes among which its number means something."""

    host: str = ""
    pid: int = 0  # 0: it has not yet said who it is
    world: str = ""
    job: str | None = None  # of SLURM, "12_3"

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")

    @property
    def is_here(self) -> bool:
        """Whether its number is that of a process which this one sees."""
        return (self.host, self.world) == (socket.gethostname(), _world())


class Lock:
    """A lock on a folder, held by this process until `close`."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self._path, self._stream = path, stream

    def check(self) -> None:
        """Raise RunLostError where the lock's file was deleted: another process can have made one of its own."""
        if not is_open_at(self._path, self._stream):
            raise RunLostError(f"{self._path} was deleted while its run was computed, so the run stops")

    def close(self) -> None:
        """Release the folder."""
        if is_open_at(self._path, self._stream):
            self._path.unlink(missing_ok=True)
        self._stream.close()


def take(folder: Path) -> Lock:
    """Lock `folder` for this process. Raises RunBusyError where another process holds it."""
    path = folder / _NAME
    for patient in (True, True, True, False):  # who only looks holds a lock for a moment, see `holder`
        while (stream := _locked(path)) is not None:
            if is_open_at(path, stream):  # else its file was deleted with the lock that was given free
                lock = Lock(path, stream)
                try:
                    stream.truncate(0)
                    stream.write(json.dumps(asdict(_me())).encode())
                except OSError:
                    lock.close()
                    raise
                return lock
            stream.close()
        if patient:
            time.sleep(_AGAIN_SECONDS / 4)
    raise RunBusyError(
        f"another process is computing this run: {folder} belongs to {holder(folder) or Owner()}", folder
    )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder, and hold it inside."""
    while True:
        try:
            lock = take(folder)
            break
        except RunBusyError:
            time.sleep(_AGAIN_SECONDS)
    with closing(lock):
        yield


def holder(folder: Path) -> Owner | None:
    """The process that holds a folder; None where none does."""
    try:
        stream = (folder / _NAME).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pass
        except OSError:  # no locks here: see `_locked`
            return None
        try:
            return Owner(**json.load(stream))
        except (ValueError, TypeError):
            return Owner()


def _locked(path: Path) -> FileIO | None:
    """The open file of a lock that is ours now; None where it is another's."""
    stream = path.open("ab", buffering=0)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    except OSError as error:
        _tell_unlocked(path.parent.parent, str(error.strerror))
    return stream


@cache
def _tell_unlocked(out: Path, why: str) -> None:
    log.warning("%s: no locks on its file system (%s), so nothing keeps two commands from computing one run", out, why)


def is_open_at(path: Path, stream: BinaryIO | FileIO) -> bool:
    """Whether the file at `path` is the one that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except OSError:
        return False


def _me() -> Owner:
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return Owner(socket.gethostname(), os.getpid(), _world(), job)


@cache
def _world() -> str:
    """Names the processes that this one sees: those of its container, where it is in one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""

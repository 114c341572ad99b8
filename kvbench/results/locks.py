"""A lock on a run's folder, so that two processes never compute the same run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

_NAME = ".lock"


class RunBusyError(RuntimeError):
    """Another process is computing this run."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class RunLostError(RuntimeError):
    """The file of this run was deleted, replaced or changed while it was computed."""


@contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. The operating system releases it if the process is killed.

    wait: wait for another process to release it, instead of raising RunBusyError.
    """
    lock = FileLock(folder / _NAME)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise RunBusyError(f"another process is computing this run: {folder}", folder) from None
    try:
        yield
    finally:
        (folder / _NAME).unlink(
            missing_ok=True
        )  # before the release: a process that locks the deleted file tries again
        lock.release()


def is_held(folder: Path) -> bool:
    """Whether a process is computing the run in this folder."""
    if not (folder / _NAME).exists():
        return False
    try:
        with held(folder):
            return False
    except RunBusyError:
        return True


def is_open_at(path: Path, stream: BinaryIO | FileIO) -> bool:
    """Whether `path` is still the file that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except OSError:
        return False

"""Files of runs and sweeps: written atomically, and locks so that two processes never compute the same run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

import yaml
from filelock import FileLock, Timeout

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version, if available, is 8 times as fast
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, with the same suffix; on success it replaces `path`.

    Readers see the old file or the new one, never a part of it, even if the process is killed. Raises OSError (full
    disk, no permission) and keeps the old file.
    """
    temporary = path.with_name(f".{path.stem}.{socket.gethostname()}.{os.getpid()}.{get_ident()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Write `text` with `atomic_write`. Does nothing if the file already has this content.

    private: only the user may read the file.
    """
    if path.exists() and path.read_bytes() == text.encode():
        return
    with atomic_write(path) as temporary:
        if private:
            temporary.touch(0o600)
        temporary.write_text(text, encoding="utf-8")


def remove_torn(folder: Path) -> None:
    """Remove temporary files that a killed process left. The caller holds the folder's lock."""
    for path in (*folder.glob(".*.json"), *folder.glob(".*.yaml")):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on disk: without it, a power cut may lose a new file."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused, because JSON has neither."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, value: object) -> None:
    """Write `value` as YAML, atomically, keys in the order given."""
    write_atomically(path, yaml_text(value))


def yaml_text(value: object) -> str:
    """`value` as YAML, keys in the order given."""
    return str(yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=120))


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - whatever YAML holds
    """The content of a YAML file. Raises OSError, and yaml.YAMLError for invalid YAML."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


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
    return is_locked(folder / _NAME)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file. A process that ends, in whatever way, releases its locks."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def is_open_at(path: Path, stream: BinaryIO | FileIO) -> bool:
    """Whether `path` is still the file that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except OSError:
        return False

"""Files of runs and sweeps: written atomically, and locks so that two processes never compute the same run."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

import yaml
from filelock import FileLock, Timeout

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version, if available, is 8 times as fast
_DEEPEST = 100
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


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for a pipe or a device, which a folder of others may contain."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its other end
    with open(number, "rb") as stream:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return stream.read()


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever JSON holds
    """The content of a JSON file. Raises OSError, and ValueError for invalid JSON."""
    return json.loads(read_bytes(path))


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - whatever YAML holds
    """The content of a YAML file. Raises OSError, and yaml.YAMLError for invalid or very deep YAML."""
    text = read_bytes(path).decode()
    if _may_be_deep(text):  # the loader in C would overflow its stack, which ends the process
        depth = 0
        for event in yaml.parse(text, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise yaml.YAMLError(f"it has more than {_DEEPEST} levels")
    return yaml.load(text, _LOADER)


def _may_be_deep(text: str) -> bool:
    """Whether brackets, also those in texts, or dashes may open more than `_DEEPEST` levels."""
    depth = 0
    for bracket in re.findall(r"[][{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEEPEST:
            return True
    return re.search(rf"(?:[-?:]\s+){{{_DEEPEST}}}", text) is not None


def digest_of(identity: Mapping[str, Any]) -> str:
    """The end of a run's id: the first 10 digits of the sha256 of its identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def fits(run_id: str, identity: Mapping[str, Any]) -> bool:
    """Whether a run's id is that of its identity; also true for an id that does not end like one."""
    return not re.search("-[0-9a-f]{10}$", run_id) or run_id.endswith(f"-{digest_of(identity)}")


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
    while not lock.is_locked:
        try:
            lock.acquire(blocking=wait)
        except Timeout:
            if is_held(folder):  # otherwise `is_locked` in another process held it for a moment
                raise RunBusyError(f"another process is computing this run: {folder}", folder) from None
    try:
        yield
    finally:
        # Before the release: a process that locks the deleted file tries again.
        (folder / _NAME).unlink(missing_ok=True)
        lock.release()


def is_held(folder: Path) -> bool:
    """Whether a process is computing the run in this folder."""
    return is_locked(folder / _NAME)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file. A process that ends, in whatever way, releases its locks.

    For a moment this takes a shared lock, which keeps nobody from finding that no process holds the exclusive one.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(number)


def is_open_at(path: Path, stream: BinaryIO | FileIO) -> bool:
    """Whether `path` is still the file that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except OSError:
        return False

"""Whose a run is while it is computed: a claim beside its samples, with an owner that shows that it lives.

A claim is a file `.claim-<n>` in the run's folder, made exclusively, which every file system can, also those that know
no locks over the network. The highest n owns the run. Its owner counts a number in it up every few seconds; whoever
wants the run compares what it reads with what it read before, on its own monotonic clock, so that clocks that jump or
disagree do no harm. Where the owner is dead, claim n + 1 is made: of many who try, one succeeds. An owner that was
only asleep finds that claim before it writes its next line, and stops.

On the owner's own machine no waiting is needed: the system knows whether a process lives.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0  # an owner that showed no life for so long is dead
_AGAIN_SECONDS = 0.1
_NAME = ".claim-"
_DIGITS = 12

log = logging.getLogger(__name__)


class RunBusyError(RuntimeError):
    """Another process is computing this run, or was: where that is on another machine, `look(folder)` finds out."""

    def __init__(self, sentence: str, folder: Path) -> None:
        super().__init__(sentence)
        self.folder = folder


class RunLostError(RuntimeError):
    """The file of this run was deleted, replaced or changed while it was computed, or another process took it over."""


@dataclass(frozen=True)
class Owner:
    """A process that owns a run. world: the processes among which its number means something."""

    host: str
    pid: int
    started: str  # when the process began, in the system's own ticks: numbers are given out again
    world: str
    job: str | None  # of SLURM, "12_3"
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")

    @property
    def is_dead(self) -> bool | None:
        """Whether the process is gone; None where that cannot be told from here."""
        if self.world != _world():
            return None
        return _start_of(self.pid) != self.started


class Claim:
    """This process owns a run until `release`, or until it is taken over."""

    def __init__(self, path: Path, number: int, said: bytes) -> None:
        self._path = path
        self._number = number
        self._next = path.with_name(f"{_NAME}{number + 1}")
        self._said = said  # with a word that no other claim has: numbers come again
        self._beats = 0

    def check(self) -> None:
        """Raise RunLostError where another process took the run over, or did and has ended since."""
        if self._next.exists() or not self._is_ours():
            raise RunLostError(
                f"{self._path.parent} was taken over by another process while this one showed no life, so the run "
                "stops: the same command computes what is missing"
            )

    def beat(self) -> None:
        """Show that the owner lives."""
        self._beats += 1
        try:
            # In place and of equal length, so that a full disk cannot stop it; closed, so that other machines see it.
            descriptor = os.open(self._path, os.O_WRONLY)
            try:
                os.write(descriptor, f"{self._beats:0{_DIGITS}d}".encode())
            finally:
                os.close(descriptor)
        except OSError as error:  # the next check says what became of the claim
            log.debug("%s: no sign of life written (%s)", self._path, error.strerror)

    def release(self) -> None:
        """Give the run free.

        Claims of dead owners go with it, and first: who lists the folder meanwhile must never find it without a claim.
        """
        _HEART.forget(self)
        if self._is_ours():
            for number in range(1, self._number):
                self._path.with_name(f"{_NAME}{number}").unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        try:
            return self._path.read_bytes()[_DIGITS:] == self._said
        except FileNotFoundError:
            return False


class _Heart:
    """The one thread that beats for all claims of this process."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, claim: Claim) -> None:
        with self._lock:
            self._claims.append(claim)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="claims", daemon=True)
                self._thread.start()

    def forget(self, claim: Claim) -> None:
        with self._lock:
            if claim in self._claims:
                self._claims.remove(claim)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                claims = list(self._claims)
                if not claims:
                    self._thread = None
                    return
            for claim in claims:
                claim.beat()


_HEART = _Heart()
_seen: dict[Path, tuple[bytes, float]] = {}  # what a claim said when it was first read, and when that was


def take(folder: Path) -> Claim:
    """Own the run in `folder`. Raises RunBusyError where another process does, or may."""
    while True:
        number, content = _highest(folder)
        if content is not None:
            path = folder / f"{_NAME}{number}"
            owner = _owner(content)
            if not _is_dead(path, content, owner):
                said = f"another process is computing this run: {folder} belongs to {owner or 'somebody'}"
                raise RunBusyError(said, folder)
            log.warning("%s: taken over from %s, which is gone", folder, owner or "somebody")
        claim = _make(folder, number + 1)
        if claim is not None:
            return claim


def look(folder: Path) -> bool | None:
    """Whether `take` would succeed now; None where the owner's life can only be watched: look again later."""
    number, content = _highest(folder)
    return True if content is None else _is_dead(folder / f"{_NAME}{number}", content, _owner(content))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Own a folder for a moment, once whoever owns it has let go or is gone."""
    while True:
        try:
            claim = take(folder)
            break
        except RunBusyError:
            time.sleep(_AGAIN_SECONDS)
    try:
        yield
    finally:
        claim.release()


def owner_of(folder: Path) -> Owner | None:
    """Who claims the run in `folder`, whether or not it lives; None where nobody does."""
    content = _highest(folder)[1]
    return None if content is None else _owner(content)


def _make(folder: Path, number: int) -> Claim | None:
    """Claim `number`, or None where somebody else was faster."""
    path = folder / f"{_NAME}{number}"
    said = json.dumps({**asdict(_me()), "token": uuid.uuid4().hex})
    rest = f" {said}\n".encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    try:
        os.write(descriptor, b"0" * _DIGITS + rest)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    claim = Claim(path, number, rest)
    _HEART.keep(claim)
    return claim


def _highest(folder: Path) -> tuple[int, bytes | None]:
    """The number of the claim that counts, and what it says; 0 and None where there is none."""
    while True:
        number = max((int(path.name.removeprefix(_NAME)) for path in folder.glob(f"{_NAME}*")), default=0)
        try:
            return number, (folder / f"{_NAME}{number}").read_bytes() if number else None
        except FileNotFoundError:  # given free at this moment, and perhaps claimed anew
            continue


def _owner(content: bytes) -> Owner | None:
    """Who a claim belongs to; None where it was killed before it could say so."""
    try:
        values: Any = json.loads(content.partition(b" ")[2])
        return Owner(**values)
    except (ValueError, TypeError):
        return None


def _is_dead(path: Path, content: bytes, owner: Owner | None) -> bool | None:
    """Whether a claim's owner is gone; None: not known yet, it has to be looked at again."""
    known = None if owner is None else owner.is_dead
    if known is not None:
        return known
    now = time.monotonic()
    before, since = _seen.get(path, (None, now))
    if before is None:
        _seen[path] = (content, now)
        return None
    if before != content:
        _seen[path] = (content, now)
        return False
    return True if now - since > PATIENCE_SECONDS else None


@cache
def _me_for(pid: int) -> Owner:
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return Owner(socket.gethostname(), pid, _start_of(pid) or "", _world(), job, "")


def _me() -> Owner:
    return _me_for(os.getpid())


@cache
def _world() -> str:
    """Names the set of processes that this one sees: the machine since it was started, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.name}"


def _start_of(pid: int) -> str | None:
    """When a process began, in ticks; "" where the system does not say; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19].decode()  # a zombie writes nothing any more
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""

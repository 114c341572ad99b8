"""Running a program nobody vouches for: on its own, for a few seconds, without network, files or other processes.

The walls are Linux namespaces and resource limits; where the kernel does not grant them nothing is run. They keep out
programs that go wrong, and most that mean harm; for code by an enemy use a virtual machine.

This file is also the script of the child, which puts the walls up and then runs the program. It gets a mount, network,
process, IPC and host name namespace of its own; a root folder that holds nothing but Python and the system's libraries,
read-only, and a small folder in memory to write to; no capability, and the user `nobody` where root starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

SECONDS, WALL_SECONDS = 3, 40.0  # of processor time, of which a busy machine gives one in several; in all
MEMORY, FILES = 2**30, 2**24  # bytes
PROCESSES, OPEN_FILES = 8, 64
NOBODY = 65534  # to root the limit on processes would not apply
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin")
UNAVAILABLE = "unavailable: "
_CHILD = Path(__file__)
_SAID_MOST = 4096  # bytes of a child's report that are read

# The kernel's constants (linux/sched.h, mount.h, prctl.h, capability.h), which Python does not have.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION, CAPABILITIES = 0x20080522, 64


class SandboxUnavailableError(ValueError):
    """This machine does not grant what the walls are made of."""


class CodeEval:
    """What lm-eval calls `code_eval`, with the sandbox in place of the bare subprocess of that metric."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], list[list[str | None]]]:
        """pass@k of the predictions for each problem, and why each failed; references: the tests of each problem.

        Source: Chen et al. 2021, arXiv 2107.03374, eq. 1: 1 - C(n-c, k) / C(n, k), mean over the problems.
        """
        pairs = zip(references, predictions, strict=True)
        failures = [[run_program(f"{program}\n{test}") for program in programs] for test, programs in pairs]
        counts = [(len(why), why.count(None)) for why in failures]
        sizes = [size for size in k if size <= min(n for n, _ in counts)]
        means = {f"pass@{size}": fmean(1 - comb(n - c, size) / comb(n, size) for n, c in counts) for size in sizes}
        return means, failures


def run_program(program: str, seconds: int = SECONDS, wall_seconds: float = WALL_SECONDS) -> str | None:
    """Run a Python program; None where its last statement was reached, else what stopped it, in a few words.

    It cannot end early and count as passed: only the end of the program tells the word that the parent waits for. (A
    program that searches the memory of its own process for that word could; one that solves nothing has no reason to.)
    Raises SandboxUnavailableError where it cannot be walled in, so that it was not run at all.
    """
    word = secrets.token_hex(16)
    order = json.dumps({"program": program, "word": word, "seconds": seconds}).encode()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(reading, "rb") as report:
        try:
            process = _start(folder, writing)
        finally:
            os.close(writing)
        try:
            process.communicate(order, timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {wall_seconds:g} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = report.read(_SAID_MOST).decode(errors="replace")
    if said.startswith(UNAVAILABLE):
        raise SandboxUnavailableError(
            f"this machine does not let a program be walled in ({said.removeprefix(UNAVAILABLE)}), so no code that "
            f"a model wrote is run: Linux with user namespaces (unshare) is needed"
        )
    return None if said == word else said or "ended before its last statement"


def _start(folder: str, report: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", str(_CHILD), str(report), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[report],
        env={"OPENBLAS_NUM_THREADS": "1"},  # a thread per core would count as processes
        cwd=folder,
        start_new_session=True,
    )


# --- the child -----------------------------------------------------------------------------------------------------
def _main() -> None:
    """Read the order, put the walls up, and run the program as the first process of its own process namespace."""
    report, folder = int(sys.argv[1]), Path(sys.argv[2])
    order = json.loads(sys.stdin.buffer.read())
    try:
        _wall_in(folder)
    except (OSError, AttributeError) as error:  # another system has no `unshare` to call
        os.write(report, f"{UNAVAILABLE}{error}".encode())
        return
    child = os.fork()
    if child:
        os.write(report, _ending(os.waitpid(child, 0)[1], order["seconds"]).encode())
        return
    os.setsid()
    _give_up_rights()
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which would clear it
    limits = {
        "CPU": order["seconds"],
        "AS": MEMORY,
        "FSIZE": FILES,
        "NOFILE": OPEN_FILES,
        "NPROC": PROCESSES,
        "CORE": 0,
    }
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    _run(order["program"], order["word"], report)
    os._exit(0)


def _call(name: str, *arguments: Any) -> None:  # noqa: ANN401 - whatever the C function takes
    """Call a function of the C library; OSError names it where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _wall_in(folder: Path) -> None:
    """Namespaces of its own; everything but Python out of sight. OSError where the kernel refuses."""
    user, group = os.getuid(), os.getgid()
    namespaces = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    _call("unshare", namespaces if user == 0 else namespaces | CLONE_NEWUSER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    _mount_memory(folder)
    for path in _seen():
        place = folder / path.relative_to("/")
        place.mkdir(parents=True, exist_ok=True)
        _call("mount", bytes(path), bytes(place), None, MS_BIND | MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    (folder / "tmp").mkdir()
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, bytes(folder), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    _mount_memory(folder / "tmp")
    os.chroot(folder)
    os.chdir("/tmp")  # the empty folder just made


def _mount_memory(place: Path) -> None:
    """An empty folder in memory at `place`."""
    _call("mount", b"tmpfs", bytes(place), b"tmpfs", MS_NOSUID | MS_NODEV, f"size={FILES}".encode())


def _seen() -> list[Path]:
    """The folders the program may read: Python, its packages, and the libraries of the system."""
    python = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *(p for p in SYSTEM if Path(p).is_dir())}
    folders = sorted({Path(os.path.realpath(path)) for path in python} | {Path(p) for p in python})
    return [f for f in folders if not any(above in folders for above in f.parents)]


def _give_up_rights() -> None:
    """No capability, now or later: what was mounted cannot be mounted otherwise again."""
    for capability in range(CAPABILITIES):
        with suppress(OSError):  # EINVAL above the last one
            _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def _run(program: str, word: str, report: int) -> None:
    """Run the program to its end, then say the word; or say what it raised."""
    me = os.getpid()
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # behind the walls
        said = word
    except BaseException as error:  # SystemExit too: a program that leaves has not reached its end
        said = f"{type(error).__name__}: {error}"[:200]
    if os.getpid() == me:  # a process it forked has nothing to say
        os.write(report, said.encode(errors="replace"))


def _ending(status: int, seconds: int) -> str:
    """What stopped the first process of the namespace, with which all others end; "" where nothing did."""
    if not os.WIFSIGNALED(status):
        return ""
    by = signal.Signals(os.WTERMSIG(status))
    return f"stopped after {seconds} seconds of processor time" if by is signal.SIGKILL else f"stopped by {by.name}"


if __name__ == "__main__":
    _main()

"""The child that `sandbox` starts: it puts up the walls, then runs the program it is given. Standard library only.

A mount, network, process, IPC and host name namespace of its own; a root folder that holds nothing but Python and the
system's libraries, read-only, and a small folder in memory to write to; no capability, and the user `nobody` where root
starts it; limits on processor time, memory, size of files, open files and processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION, CAPABILITIES = 0x20080522, 64
PROCESSES, OPEN_FILES = 8, 64
NOBODY = 65534  # to root the limit on processes would not apply
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin")

_libc = ctypes.CDLL(None, use_errno=True)


def check(name: str, *arguments: Any) -> None:  # noqa: ANN401 - whatever the C function takes
    """Call a function of the C library; OSError names it where it fails."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def wall_in(folder: Path, files: int) -> None:
    """Namespaces of its own; everything but Python out of sight. OSError where the kernel refuses."""
    user, group = os.getuid(), os.getgid()
    namespaces = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    check("unshare", namespaces if user == 0 else namespaces | CLONE_NEWUSER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    check("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    mount_memory(folder, files)
    for path in seen():
        place = folder / path.relative_to("/")
        place.mkdir(parents=True, exist_ok=True)
        check("mount", bytes(path), bytes(place), None, MS_BIND | MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    (folder / "tmp").mkdir()
    check("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, bytes(folder), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    mount_memory(folder / "tmp", files)
    os.chroot(folder)
    os.chdir("/tmp")  # the empty folder just made


def mount_memory(place: Path, size: int) -> None:
    """An empty folder in memory at `place`, of at most `size` bytes."""
    check("mount", b"tmpfs", bytes(place), b"tmpfs", MS_NOSUID | MS_NODEV, f"size={size}".encode())


def seen() -> list[Path]:
    """The folders the program may read: Python, its packages, and the libraries of the system."""
    python = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *(p for p in SYSTEM if Path(p).is_dir())}
    folders = sorted({Path(os.path.realpath(path)) for path in python} | {Path(p) for p in python})
    return [f for f in folders if not any(above in folders for above in f.parents)]


def limit(limits: dict[str, Any]) -> None:
    """Resource limits, soft and hard alike."""
    for name, most in (
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["files"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (most, most))


def give_up_rights() -> None:
    """No capability, now or later: what was mounted cannot be mounted otherwise again."""
    for capability in range(CAPABILITIES):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL above the last one
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    check("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    check("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def run(program: str, word: str, report: int) -> None:
    """Run the program to its end, then say the word; or say what it raised."""
    me = os.getpid()
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # behind the walls
        said = word
    except BaseException as error:  # SystemExit too: a program that leaves has not reached its end
        said = f"{type(error).__name__}: {error}"[:200]
    if os.getpid() == me:  # a process it forked has nothing to say
        os.write(report, said.encode(errors="replace"))


def main() -> None:
    """Read the order, build the walls, and run the program as the first process of its own process namespace."""
    report, folder = int(sys.argv[1]), Path(sys.argv[2])
    order = json.loads(sys.stdin.buffer.read())
    limits = order["limits"]
    try:
        wall_in(folder, limits["files"])
    except (OSError, AttributeError) as error:  # another system has no `unshare` to call
        os.write(report, f"unavailable: {error}".encode())
        return
    child = os.fork()
    if child:
        os.write(report, watch(child, limits).encode())
        return
    os.setsid()
    give_up_rights()
    check("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which would clear it
    limit(limits)
    run(order["program"], order["word"], report)
    os._exit(0)


def watch(child: int, limits: dict[str, Any]) -> str:
    """Wait for the first process of the namespace, with which all others end; what stopped it, or nothing."""
    end = time.monotonic() + limits["wall_seconds"]
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"stopped after {limits['wall_seconds']:g} seconds"
        time.sleep(0.01)
    if not os.WIFSIGNALED(status):
        return ""
    if os.WTERMSIG(status) == signal.SIGKILL:
        return f"stopped after {limits['seconds']} seconds of processor time"
    return f"stopped by {signal.Signals(os.WTERMSIG(status)).name}"


if __name__ == "__main__":
    main()

"""Where and with what a run was computed: versions, revision, hardware. Recorded, but never part of run_id."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("kvbench", "torch", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy", "triton", "lm-eval")


def environment(device: torch.device) -> dict[str, Any]:
    """What `environment.json` says about this process and the device it computes on."""
    import torch  # here: seconds, which the help of a command that reads results need not wait for

    return {
        **versions(),
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": _memory_bytes(),
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "cuda": torch.version.cuda if device.type == "cuda" else None,  # a package's version need not tell it
        },
    }


def versions() -> dict[str, Any]:
    """With what software this process computes."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "kvbench_revision": git_revision(Path(__file__).resolve().parent),
    }


def other_versions(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str:
    """Which versions differ between environments, as `torch 2.11 then, 2.13 now`; empty where none does.

    The code of kvbench that computes is part of a run's identity, so that its revision need not be compared.
    """
    said = {}
    for earlier in before:
        pairs = {**earlier["packages"], "python": earlier["python"]}, {**now["packages"], "python": now["python"]}
        for name in sorted(pairs[0].keys() | pairs[1].keys()):
            then, here = pairs[0].get(name), pairs[1].get(name)
            if then != here:
                said[name] = f"{name} {then} then, {here} now"
    return "; ".join(said.values())


def machine(environment: Mapping[str, Any], threads: bool = True) -> str:
    """What computed: a GPU, or a processor. threads: with how many of its threads, on which seconds depend."""
    found = environment["hardware"]
    if found["device_name"]:
        return str(found["device_name"])
    count = found["torch_threads"]
    return f"{found['processor']}{f', {count} thread' + 's' * (count != 1) if threads else ''}"


def git_revision(folder: Path) -> str | None:
    """Commit of the checkout that `folder` belongs to, with "+dirty" where tracked files differ; None outside of one.

    An installed package inside somebody else's checkout (a virtual environment there) is not part of it: None.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+dirty" if revision and dirty else revision


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here: the revision is unknown, and recorded as such
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name; Linux tells it only in /proc."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None

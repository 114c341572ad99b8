"""Where a run was computed: versions, revision, hardware. Recorded, but not part of run_id."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("kvbench", "torch", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy", "triton", "lm-eval")


def environment(device: torch.device) -> dict[str, Any]:
    """The content of `environment.json`: this process and its device."""
    import torch  # imported here: it takes seconds, and commands that only read results do not need it

    cuda = device.type == "cuda"
    memory = None
    with suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **versions(),
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": memory,
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device) if cuda else None,
            "cuda": torch.version.cuda if cuda else None,
        },
    }


def versions() -> dict[str, Any]:
    """Versions of Python, packages and kvbench's code."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    revision = git_revision(Path(__file__).resolve().parent)
    return {"packages": found, "python": platform.python_version(), "kvbench_revision": revision}


def other_versions(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str:
    """The versions that differ between environments, as `torch 2.11 then, 2.13 now`; empty if none does.

    The revision of kvbench is not compared, because the code that computes is part of a run's identity.
    """
    found = {}
    for earlier in before:
        then, here = ({**one["packages"], "python": one["python"]} for one in (earlier, now))
        for name in sorted(then.keys() | here.keys()):
            if then.get(name) != here.get(name):
                found[name] = f"{name} {then.get(name)} then, {here.get(name)} now"
    return "; ".join(found.values())


def machine(environment: Mapping[str, Any], threads: bool = True) -> str:
    """The GPU or processor. threads: with the number of threads, on which times depend."""
    found = environment["hardware"]
    if found["device_name"]:
        return str(found["device_name"])
    count = found["torch_threads"]
    return f"{found['processor']}{f', {count} thread' + 's' * (count != 1) if threads else ''}"


def git_revision(folder: Path) -> str | None:
    """The commit of the checkout that tracks `folder`, with "+dirty" if tracked files differ; None without one.

    None for a package installed inside another checkout, such as a virtual environment there.
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
    except (OSError, subprocess.TimeoutExpired):  # git is not installed: the revision is unknown
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    """The name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

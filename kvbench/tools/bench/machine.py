"""What a figure depends on besides the code: hardware, versions, clocks, and who else is using the machine."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvbench.identity.environment import environment, git_revision
from kvbench.identity.environment import machine as computed_by
from kvbench.tools.bench.clock import copy_bandwidth

QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit")
SMI_SECONDS = 5


def machine(device: torch.device) -> dict[str, Any]:
    """The constant part: packages, revision, hardware, and the bandwidth of a copy in bytes per second."""
    return {**environment(device), "kvbench_revision": revision(), "copy_bytes_per_s": bandwidth(device)}


@lru_cache
def revision() -> str | None:
    """The commit this code is of; where a copy without git runs, what KVBENCH_REVISION says."""
    return git_revision(Path(__file__).resolve().parent) or os.environ.get("KVBENCH_REVISION")


@lru_cache
def bandwidth(device: torch.device) -> float:
    """Measured once for each device of a process."""
    return copy_bandwidth(device)


def momentary(device: torch.device) -> dict[str, Any]:
    """What changes while a benchmark runs: the load of the CPUs; clocks and other processes of the GPU, where known."""
    state: dict[str, Any] = {"load_1min": round(os.getloadavg()[0], 2)}
    return state | _gpu(int(time.monotonic()) // SMI_SECONDS) if device.type == "cuda" else state


@lru_cache(maxsize=1)
def _gpu(now: int) -> dict[str, Any]:
    """What nvidia-smi says: asked at most once in SMI_SECONDS, for it takes longer than a small cell."""
    others = _smi("--query-compute-apps=pid,used_memory") or ""
    processes = [line for line in others.splitlines() if not line.startswith(f"{os.getpid()},")]
    return {"gpu": _smi("--query-gpu=" + ",".join(QUERY)), "gpu_processes": processes}


def _smi(query: str) -> str | None:
    """What nvidia-smi answers; None where it is not installed or refuses."""
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no tool, no answer: recorded as unknown
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@lru_cache
def device_line(device: torch.device) -> str:
    """The device in words, for headers and columns."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return computed_by(environment(device))


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more but by a circle, such as an error and its frames."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        gc.collect(1)  # the oldest objects are those of imports: looking through them takes longer than a small cell


def lost(device: torch.device) -> bool:
    """Whether this process cannot reach the device any more: after an illegal access to its memory every call fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def free_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

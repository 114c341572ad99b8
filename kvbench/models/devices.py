"""The devices of a machine: their clock, their memory, and whether they record steps."""

from __future__ import annotations

import gc
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvbench.errors import UsageError

_MEMINFO, _CGROUP, _PROCESS = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self")


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first CUDA device, else the CPU. Raises UsageError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count()
    available = ["auto", "cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if name not in available:
        raise UsageError(f"device={name} is not available here, choose one of {', '.join(available)}")
    return torch.device(name)


def records_steps(device: torch.device) -> bool:
    """Whether calls of a model on this device can be recorded as CUDA graphs."""
    return device.type == "cuda"


def description(device: torch.device) -> dict[str, str | None]:
    """The name of a device and the version of CUDA, None on a CPU."""
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else None
    return {"device": str(device), "device_name": name, "cuda": torch.version.cuda if gpu else None}


# --- time ------------------------------------------------------------------------------------------------------------
def now(model: PreTrainedModel) -> float:
    """Seconds on a monotonic clock, after all devices of the model have finished their work."""
    spread = getattr(model, "hf_device_map", None)
    places = spread.values() if spread else [model.device]
    return seconds(*(torch.device(place) for place in places if place not in ("cpu", "disk")))


def seconds(*devices: torch.device) -> float:
    """Seconds on a monotonic clock, after devices have finished their work."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a large copy on a device, those read and those written; the best of some copies."""
    size = min(2**30 if device.type == "cuda" else 2**28, free(device) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(6):
        start = seconds(device)
        target.copy_(source)
        best = max(best, 2 * size / (seconds(device) - start))
    return best


# --- memory ----------------------------------------------------------------------------------------------------------
def reset_peak(device: torch.device) -> None:
    """Reset the recorded peak of allocated bytes; does nothing on a CPU."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak(device: torch.device) -> int | None:
    """The most bytes allocated since `reset_peak`, weights included, over all CUDA devices; None on a CPU."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def release() -> None:
    """Return memory that PyTorch has reserved and not allocated to the devices."""
    torch.cuda.empty_cache()


def reset_process_peak(device: torch.device) -> None:
    """Free what earlier measurements left, and reset the peak that `process_peak` reads."""
    gc.collect()
    release()
    reset_peak(device)
    try:
        (_PROCESS / "clear_refs").write_text("5")  # Linux: the peak of the resident size is reset
    except OSError:
        return


def process_peak(device: torch.device) -> int | None:
    """`peak`; on a CPU the most resident bytes of this process since `reset_process_peak` (Linux), else None."""
    if device.type == "cuda":
        return peak(device)
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class DeviceMemory(NamedTuple):
    """Bytes of a CUDA device: free, reserved by PyTorch's allocator, and allocated to tensors."""

    free: int
    reserved: int
    allocated: int


def free(device: torch.device) -> int:
    """Free bytes: of all CUDA devices (`obtainable`), or of the host within its cgroup."""
    return obtainable(_allocators()) if device.type == "cuda" else _host_free()


def obtainable(devices: Sequence[DeviceMemory]) -> int:
    """Bytes that layers spread evenly over devices can use: those of the fullest device, times their number.

    Memory that PyTorch's allocator has reserved and not allocated counts as free.
    """
    return min(one.free + one.reserved - one.allocated for one in devices) * len(devices)


def _allocators() -> list[DeviceMemory]:
    cuda = torch.cuda
    devices = range(cuda.device_count())
    return [DeviceMemory(cuda.mem_get_info(i)[0], cuda.memory_reserved(i), cuda.memory_allocated(i)) for i in devices]


def _host_free() -> int:
    """MemAvailable of Linux, limited by the cgroup; on other systems half of the memory."""
    try:
        kib = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable")).split()[1]
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(min(1024 * int(kib), _cgroup_free()))


def _cgroup_free() -> int | float:
    """Free bytes of a container (cgroup v2), including cached file pages; infinity without a limit."""
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        lines = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return math.inf if most == "max" else int(most) - used + int(lines.get("inactive_file", 0))

"""Clock and memory of the devices: time after pending work, peak of allocated bytes, and free bytes."""

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def now(model: PreTrainedModel) -> float:
    """Seconds on a monotonic clock, after all devices of the model have finished their work."""
    spread = getattr(model, "hf_device_map", None)
    places: Iterable[torch.device | str | int] = spread.values() if spread else [model.device]
    for device in {torch.device(place) for place in places if place not in ("cpu", "disk")}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


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


class Allocator(NamedTuple):
    """Bytes of a CUDA device: free, reserved by PyTorch's allocator, and allocated to tensors."""

    free: int
    reserved: int
    allocated: int


def free(device: torch.device) -> int:
    """Free bytes: of all CUDA devices (`obtainable`), or of the host within its cgroup."""
    return obtainable(_allocators()) if device.type == "cuda" else _host_free()


def obtainable(devices: Sequence[Allocator]) -> int:
    """Bytes that layers spread evenly over devices can use: those of the fullest device, times their number.

    Memory that PyTorch's allocator has reserved and not allocated counts as free.
    """
    return min(one.free + one.reserved - one.allocated for one in devices) * len(devices)


def _allocators() -> list[Allocator]:
    cuda = torch.cuda
    devices = range(cuda.device_count())
    return [Allocator(cuda.mem_get_info(i)[0], cuda.memory_reserved(i), cuda.memory_allocated(i)) for i in devices]


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

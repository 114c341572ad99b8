"""Memory of the devices: the most that was allocated, as PyTorch's allocator counts it, and what is free."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def forget_peak(device: torch.device) -> None:
    """Start to look for a new peak; on a device without such a count nothing happens."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak(device: torch.device) -> int | None:
    """Bytes allocated at the peak since `forget_peak`, weights included, over all CUDA devices; None elsewhere."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


class Allocator(NamedTuple):
    """Bytes of a CUDA device: free, taken by PyTorch's allocator, and of those given out to tensors."""

    free: int
    reserved: int
    allocated: int


def free(device: torch.device) -> int:
    """Bytes that can be had now: of all CUDA devices (`obtainable`), or of the host within its cgroup.

    What PyTorch's allocator holds without using it counts as free.
    """
    return obtainable(_allocators()) if device.type == "cuda" else _host_free()


def obtainable(devices: Sequence[Allocator]) -> int:
    """Bytes that layers spread evenly over devices can have: what the least free one gives, times their number."""
    return min(one.free + one.reserved - one.allocated for one in devices) * len(devices)


def _allocators() -> list[Allocator]:
    cuda = torch.cuda
    asked = range(cuda.device_count())
    return [Allocator(cuda.mem_get_info(i)[0], cuda.memory_reserved(i), cuda.memory_allocated(i)) for i in asked]


def _host_free() -> int:
    """What Linux says is available, no more than the container may still take; elsewhere half of the memory."""
    try:
        kib = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable")).split()[1]
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(min(1024 * int(kib), _cgroup_free()))


def _cgroup_free() -> int | float:
    """Bytes a container may still take (cgroup v2), file pages that can be dropped included; infinity without limit."""
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        lines = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return math.inf if most == "max" else int(most) - used + int(lines.get("inactive_file", 0))

"""Memory of the devices: the most that was allocated, as PyTorch's allocator counts it, and what is free."""

import math
import os
from pathlib import Path

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


def free(device: torch.device) -> int:
    """Bytes that can be had now: of the least free CUDA device times their number, or of the host within its cgroup.

    What PyTorch's allocator holds without using it counts as free.
    """
    if device.type != "cuda":
        return _host_free()
    devices = range(torch.cuda.device_count())
    unused = [torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i) for i in devices]
    return min(torch.cuda.mem_get_info(i)[0] + spare for i, spare in zip(devices, unused, strict=True)) * len(devices)


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

"""Time and bandwidth of a device: marks that do not stop it, spreads instead of single figures, what a copy reaches.

And whether a kernel was compiled meanwhile, whose seconds belong to no figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from kvbench.kernels.jit import triton

COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes of one buffer: far more than any cache of the processor holds


class Clock:
    """Milliseconds between marks. On CUDA they are events in the stream: marking does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def laps(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits until the device has passed the last one."""
        wait_for(self._device)
        return [_between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float):
        assert isinstance(second, float)
        return 1e3 * (second - first)
    assert isinstance(second, torch.cuda.Event)
    return float(first.elapsed_time(second))


def wait_for(device: torch.device) -> None:
    """Return once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache(maxsize=1)
def _loaded() -> list[str]:
    """Fills with the names of kernels from now on: Triton loads one after it was compiled, before its first launch."""
    names: list[str] = []
    if triton is not None:
        triton.knobs.runtime.kernel_load_end_hook.add(lambda module, function, name, *_: names.append(name))
    return names


def kernels_loaded() -> int:
    """How many kernels Triton has loaded since this was first asked."""
    return len(_loaded())


@dataclass(frozen=True)
class Spread:
    """Median and the 20th and 80th percentile of `runs` figures."""

    p50: float
    p20: float
    p80: float
    runs: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def spread(figures: Sequence[float]) -> Spread:
    """Percentiles by linear interpolation between the sorted figures. ValueError for none."""
    if not figures:
        raise ValueError("a spread needs at least one figure, got none")
    if len(figures) == 1:
        return Spread(figures[0], figures[0], figures[0], 1)
    p20, _, _, p80 = statistics.quantiles(figures, n=5, method="inclusive")
    return Spread(statistics.median(figures), p20, p80, len(figures))


def paired_ratio(mine: Sequence[float], others: Sequence[float]) -> Spread:
    """The ratio of two providers that took turns: taken round by round, where the machine was equally busy."""
    return spread([a / b for a, b in zip(mine, others, strict=True)])


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes per second that a copy of a large buffer moves, reading and writing counted: the median of `repeats`."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    clock = Clock(device)
    clock.mark()
    for _ in range(repeats):
        target.copy_(source)
        clock.mark()
    return 2 * source.nbytes / (1e-3 * statistics.median(clock.laps()))

"""Time and bandwidth of a device: marks that do not stop it, spreads instead of single figures, what a copy reaches.

And whether a kernel was compiled meanwhile, whose seconds belong to no figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import cycle

import torch

from kvbench.kernels.tiles import triton

COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes of one buffer: far more than any cache of the processor holds
FEWEST, MOST, SECONDS = 5, 200, 0.3  # timed calls: at least, at most, and for so long between them
DELAY, LONGEST_DELAY = 2**20, 2**31  # cycles that the device is kept busy before a timed call: at first, and at most
COLD = 2  # inputs that take turns are so many times the device's cache in all, or a set for every call


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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [_between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return 1e3 * (second - first)
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    return float(first.elapsed_time(second))


# --- one call --------------------------------------------------------------------------------------------------------
def sets_of_inputs(nbytes: int, device: torch.device) -> int:
    """How many sets of a call's inputs take turns so that each is read from memory; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return min(MOST, 1 + COLD * _cache_bytes(device) // max(1, nbytes))


def _cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _fill_cache(device: torch.device) -> None:
    """What lay in the device's cache, such as inputs just made, is in its memory alone."""
    torch.zeros(COLD * _cache_bytes(device), dtype=torch.uint8, device=device)


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> Spread:
    """Milliseconds of a call that was made before, on sets of inputs that take turns. RuntimeError as `Delayed`."""
    timed = _seconds
    if device.type == "cuda":
        timed = Delayed().ms
        _fill_cache(device)
    times: list[float] = []
    for call in cycle(calls):
        times.append(timed(call))
        long = times[0] > 1e3 * SECONDS  # so long that one has to do
        if long or len(times) >= MOST or (len(times) >= FEWEST and sum(times) > 1e3 * SECONDS):
            break
    return spread(times)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


class Delayed:
    """Times calls on a GPU without what launching them costs the host.

    The device is kept busy until the host has handed over the whole call. Where it had to wait for the host all the
    same, the delay was too short, and the call is made again after a longer one.
    """

    def __init__(self) -> None:
        self._cycles = DELAY

    def ms(self, call: Callable[[], object]) -> float:
        """Milliseconds of the device. RuntimeError for a call that itself waits for the device."""
        while True:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self._cycles)
            began.record()
            call()
            ended.record()
            late = began.query()
            ended.synchronize()
            if not late:
                return float(began.elapsed_time(ended))
            if self._cycles >= LONGEST_DELAY:
                raise RuntimeError("the call waits for the device, so that its time would be the host's too")
            self._cycles *= 4


# --- kernels compiled, figures of several runs, bandwidth -------------------------------------------------------------
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

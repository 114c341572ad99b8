"""The memory of devices, and the planner that decides how many more sequences fit."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from itertools import accumulate, islice
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch

from kvbench.cache.families import layout_of
from kvbench.engine.run_writer import RunWriter
from kvbench.models.prompt import Prompt
from kvbench.policies.policy import total_slots
from kvbench.run.run import Run

DEFAULT_SEQUENCES = 512
"""Maximum batch without engine.rows: a step of more sequences takes longer in proportion."""
MARGIN = 0.2  # share of the free memory that is left for everything not counted here
PREFILL = 2.0  # memory of a prefill in full caches of the prompt, until it is measured: the cache and activations

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


class MemoryPlanner:
    """Decides how many sequences of an example may be admitted in addition to those in flight.

    A sequence is expected to hold the bytes of the full cache times the share of tokens that its policy keeps at the
    end, corrected by the largest ratio of held to expected bytes among the finished sequences of its run. A prefill
    takes `PREFILL` full caches of the prompt in addition, or more if more was measured on CUDA. Sequences are admitted
    while they fit the free memory of the device (on a CPU, of the host), minus `MARGIN` and the bytes that sequences in
    flight will still need. If none is in flight, one is admitted in any case.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._corrections: dict[RunWriter, float] = {}
        self._prefill = PREFILL

    def fits(
        self,
        prompts: Sequence[Prompt],
        runs: Sequence[RunWriter],
        in_flight: Sequence[tuple[RunWriter, Prompt]],
        nbytes: int,
    ) -> int:
        """How many sequences may enter with one prefill, among the prompts in order, each for all runs.

        0 if not even the first prompt fits for all runs, in addition to the sequences in flight of `nbytes` bytes.
        """
        most = self._limit or max(DEFAULT_SEQUENCES, len(runs))
        run = runs[0].run
        held = sum(self._expects(*one) for one in in_flight)
        held += sum(reference_bytes(run, prompt) for prompt in {id(prompt): prompt for _, prompt in in_flight}.values())
        room = (1 - MARGIN) * free(run.device) - max(0, held - nbytes)
        room -= self._prefill * run.checkpoint.full_cache_bytes(len(prompts[0].ids))
        each = (
            self._expects(one, prompt) + reference_bytes(run, prompt) * (one is runs[0])
            for prompt in prompts
            for one in runs
        )
        expected = accumulate(each)
        count = sum(total <= room for total in islice(expected, max(0, most - len(in_flight))))
        if in_flight:
            return count if count >= min(len(runs), most) else 0
        return max(1, count)

    def _expects(self, run: RunWriter, prompt: Prompt) -> int:
        """Bytes that a sequence of a run is expected to hold at its end."""
        return ceil(self._corrections.get(run, 1.0) * sequence_bytes(run.run, prompt))

    def finished(self, run: RunWriter, prompt: Prompt, nbytes: int) -> None:
        """A sequence has finished with `nbytes` bytes."""
        ratio = nbytes / max(1, sequence_bytes(run.run, prompt))
        self._corrections[run] = max(self._corrections.get(run, 0.0), ratio)

    def ran_out(self, sequences: int) -> None:
        """Memory ran out with this many sequences: half of them are the limit from now on."""
        limit = max(1, sequences // 2)
        if self._limit is None or limit < self._limit:
            self._limit = limit
            log.warning("memory ran out with %d sequences in flight, now at most %d", sequences, limit)
        torch.cuda.empty_cache()

    def measured(self, prompt: Prompt, run: Run, nbytes: int) -> None:
        """A prefill took `nbytes` bytes in addition to its sequences."""
        self._prefill = max(self._prefill, nbytes / max(1, run.checkpoint.full_cache_bytes(len(prompt.ids))))


def sequence_bytes(run: Run, prompt: Prompt) -> int:
    """Bytes of keys, values and states at the end of the longest answer to a prompt, in a dense store."""
    tokens = prompt.tokens + prompt.most_new_tokens
    kept = ceil(run.checkpoint.full_cache_bytes(tokens) * _kept_share(run, prompt.length, tokens))
    return kept + run.checkpoint.state_bytes


def reference_bytes(run: Run, prompt: Prompt) -> int:
    """Bytes of the full cache with which the sequences of an example are compared (task.divergence), if they are."""
    return run.checkpoint.full_cache_bytes(prompt.tokens + prompt.most_new_tokens) if run.task.divergence else 0


def _kept_share(run: Run, length: int, tokens: int) -> float:
    """Kept tokens divided by all tokens; above 1 if every query head keeps its own."""
    policy, config = run.policy, run.checkpoint.config.get_text_config(decoder=True)
    copies = 1
    if policy.granularity == "query_head":
        copies = int(config.num_attention_heads) // int(getattr(config, "num_key_value_heads", None) or 1)
    if policy.budget is None or policy.reader is not None:
        return copies
    layers = len(layout_of(config).attention)
    kept = total_slots(policy, layers, length) / layers
    grown = tokens - length
    if policy.evicts and policy.schedule.returns_to_budget:
        held = round(kept)
        grown = min(grown, policy.schedule.decoded(held, tokens, length) - held + policy.schedule.spare)
    return copies * min(1.0, (kept + grown) / tokens)


# --- devices ---------------------------------------------------------------------------------------------------------
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

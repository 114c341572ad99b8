"""Layers that attend to the keys and values of an earlier layer, their owner (Gemma 3n, Gemma 4).

The policy evicts by the attention of the owner. The owner evicts after its last reader has attended; if a call has
several steps of the schedule, readers attend to a copy of the slots at each step.

Shapes: B batch, H_q query heads, M new tokens of a call, n of them that a reader computes, D head dim.
"""

from typing import NamedTuple

from torch import Tensor

from kvbench.cache.attention import attend, attend_to_survivors
from kvbench.cache.families import Layout
from kvbench.cache.step import Step
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams


class _Read(NamedTuple):
    """A step of an owner for its readers, whose tokens are columns `begin` to `end` of row `row` in the call."""

    row: int
    begin: int
    end: int
    step: Step

    def attend(self, queries: Tensor, params: AttentionParams) -> Tensor:
        step = self.step.read_by(queries, params)
        first = self.step.policy.schedule.order == "attend_then_evict"
        return attend(step, Needs()) if first else attend_to_survivors(step)


class SharedReads:
    """The steps of owners in the running call."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._remaining = 0  # readers that have not attended
        self._reads: dict[int, list[_Read]] = {}

    def begin(self) -> None:
        """Begin a call."""
        self._remaining = len(self._layout.owners)
        self._reads.clear()

    @property
    def all_read(self) -> bool:
        """Whether every reader of the call has attended."""
        return self._remaining == 0

    def delays(self, step: Step) -> bool:
        """Whether an eviction waits for readers: that of an owner or a later layer, so that their order is kept."""
        return step.alone and step.layer.index >= min(self._layout.owned)

    def add(self, index: int, row: int, first: int, step: Step) -> None:
        """Store a step if its layer is an owner; first: the column of its first token in the call."""
        if index in self._layout.owned:
            end = first + step.queries.shape[2]
            self._reads.setdefault(index, []).append(_Read(row, first, end, step if step.alone else step.copied()))

    def attend(self, owner: int, columns: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention [B,H_q,n,D] of a reader for the last n of a call's `columns`."""
        reads = self._reads[owner]
        self._remaining -= 1
        if self.all_read:
            self._reads = {}
        here, skipped = queries.to(reads[0].step.values.device), columns - queries.shape[2]
        out = here.new_zeros(*here.shape[:3], reads[0].step.values.shape[-1])
        for read in reads:
            begin, end = max(0, read.begin - skipped), max(0, read.end - skipped)
            if begin < end and (read.step.sequence is None or read.step.sequence.error is None):
                rows = slice(read.row, read.row + 1)
                try:
                    out[rows, :, begin:end] += read.attend(here[rows, :, begin:end], params)
                except Exception as error:
                    read.step.sequence.fail(error)
        return out.to(queries.device)

"""Layers that attend to the keys and values of an earlier layer, their owner (Gemma 3n, Gemma 4).

The policy evicts by the attention of the owner. The owner evicts after its last reader has attended; if a call has
several steps of the schedule, readers attend to a copy of the slots at each step.

Shapes: B batch, H_q query heads, M new tokens of a call, n of them that a reader computes, D head dim.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kvbench.cache.attention import LayerStep, attend, attend_to_survivors
from kvbench.cache.group import PolicyGroup
from kvbench.cache.layout import Layout
from kvbench.cache.state import LayerState
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams


class _Read(NamedTuple):
    """A step of an owner for its readers; values [B,H_kv,m,D]: of the step's tokens."""

    group: PolicyGroup
    step: LayerStep
    values: Tensor

    def attend(self, queries: Tensor, params: AttentionParams) -> Tensor:
        step = self.step.read_by(queries, params)
        if self.group.policy.schedule.order == "attend_then_evict":
            return attend(step, Needs())
        return attend_to_survivors(step, self.values[:, :, -queries.shape[2] :])


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

    def delays(self, layer: LayerState, step: LayerStep) -> bool:
        """Whether an eviction waits for readers: that of an owner or a later layer, so that their order is kept."""
        return step.alone and layer.index >= min(self._layout.owned)

    def add(self, group: PolicyGroup, layer: LayerState, step: LayerStep, values: Tensor) -> None:
        """Store a step if the layer is an owner; values: of the step's tokens."""
        if layer.index in self._layout.owned:
            read = _Read(group, step if step.alone else step.copied(), values)
            self._reads.setdefault(layer.index, []).append(read)

    def attend(
        self, owner: int, columns: int, queries: Tensor, params: AttentionParams, rows: Mapping[PolicyGroup, slice]
    ) -> Tensor:
        """Attention [B,H_q,n,D] of a reader for the last n of a call's `columns`; rows: the sequences of each group."""
        reads = self._reads[owner]
        self._remaining -= 1
        if self.all_read:
            self._reads = {}
        here, skipped = queries.to(reads[0].values.device), columns - queries.shape[2]
        out = here.new_zeros(*here.shape[:3], reads[0].values.shape[-1])
        for read in reads:
            if read.group.error is not None:
                continue
            begin, end = (max(0, edge - skipped) for edge in (read.step.now.columns.start, read.step.now.columns.stop))
            if begin < end:
                own = out[rows[read.group], :, begin:end]
                try:
                    own += read.attend(here[rows[read.group], :, begin:end], params)
                except Exception as error:
                    read.group.fail(error)
        return out.to(queries.device)

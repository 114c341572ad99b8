"""Layers that attend to the keys and values of an earlier layer, their owner (Gemma 3n, Gemma 4).

The policy evicts by the attention of the owner. The owner evicts after its last reader has attended; if its slots
change before that (several steps of the schedule in a call, codes after an eviction), readers attend to a copy of them.

Shapes: B batch, H_q query heads, M new tokens of a call, n of them that a reader computes, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Self

from torch import Tensor, nn

from kvbench.cache.attention import attend, attend_to_survivors
from kvbench.cache.calls import Columns
from kvbench.cache.extra import Caller, Extra, Passed, When
from kvbench.cache.families import Layout
from kvbench.cache.hook import LayerCall
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.slot_store import SlotStore


def _read(owner: Step, queries: Tensor, params: AttentionParams) -> Tensor:
    """Attention of a reader's queries [1,H_q,n,D], those of the last n tokens of a step of its owner."""
    step, new = replace(owner, queries=queries, params=params, observed=False), queries.shape[2]
    if new < owner.queries.shape[2]:
        step.keys, step.values = step.keys[:, :, -new:], step.values[:, :, -new:]
        step.positions, step.fresh = step.positions[:, -new:], False
    first = step.policy.schedule.order == "attend_then_evict"
    return attend(step, Needs()) if first else attend_to_survivors(step)


def _copied(step: Step) -> Step:
    """A step over a copy of the slots, which later steps do not change."""
    held = step.store
    contents = {"keys": held.keys, "values": held.values, "positions": held.positions}
    if held.slots.bias is not None:
        contents["bias"] = held.slots.bias
    kept = SlotStore.of({name: x.clone() for name, x in contents.items()}, (), held.slots.ascending)
    return replace(step, store=kept, observed=False, pages=deepcopy(step.pages))


class SharedReads(Extra):
    """The steps of owners in the running call."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._remaining = 0  # readers that have not attended
        self._reads: dict[int, list[Step]] = {}

    def new_call(self, cache: Caller, index: int, place: int, keys: Tensor, values: Tensor) -> Passed | None:
        if place not in self._layout.owned:
            return None
        call = SharedCall(cache, index, keys, values, self, place)
        return call, call

    def begin_call(self, sequences: Sequence[CachedSequence], mask: Tensor | None) -> None:
        self._remaining = len(self._layout.owners)
        self._reads.clear()

    @property
    def call_is_over(self) -> bool:
        return self._remaining == 0

    def before_eviction(self, step: Step) -> When:
        """That of an owner or a later layer waits for readers, so that their order is kept."""
        reads_later = not self.call_is_over and step.policy.schedule.order == "attend_then_evict"
        waits = reads_later and step.alone and step.layer.index >= min(self._layout.owned)
        return "end of call" if waits else "now"

    def attended(self, step: Step) -> None:
        if step.layer.index in self._layout.owned:
            changes = not step.alone or not (
                step.policy.store.exact or step.policy.schedule.order == "attend_then_evict"
            )
            self._reads.setdefault(step.layer.index, []).append(_copied(step) if changes else step)

    def attend(self, call: SharedCall, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention [B,H_q,n,D] of a reader for the last n tokens of a call of its owner."""
        reads, values = self._reads.get(call.place, []), call.new_values
        self._remaining -= 1
        if self.call_is_over:
            self._reads = {}
        here, skipped = queries.to(values.device), call.new_keys.shape[2] - queries.shape[2]
        out = call.cache.read(call.place, here, params)
        if out is None:
            out = here.new_zeros(*here.shape[:3], values.shape[-1])
        for step in reads:
            begin, end = (max(0, x - skipped) for x in (step.first, step.first + step.queries.shape[2]))
            if begin < end and step.sequence.error is None:
                rows = slice(step.row, step.row + 1)
                try:
                    out[rows, :, begin:end] += _read(step, here[rows, :, begin:end], params)
                except Exception as error:
                    step.sequence.fail(error)
        return out.to(queries.device)


class SharedCall(LayerCall):
    """The call of an owner, whose attention is followed by that of its readers. place: among the attention layers."""

    cache: Caller

    def __init__(self, cache: Caller, index: int, keys: Tensor, values: Tensor, reads: SharedReads, place: int) -> None:
        super().__init__(cache, index, keys, values)
        self._reads, self.place = reads, place

    def to(self, *args: object, **kwargs: object) -> Self:
        """Models move shared keys to the device of a reader; instead, its queries are moved to that of the store."""
        return self

    def attend(self, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams) -> Tensor:
        if not self.done:
            return super().attend(module, queries, columns, params)
        out = self._reads.attend(self, queries, params)
        if self._reads.call_is_over:
            self.cache.end_call()
        return out

"""Blocks of a prompt, recorded as a CUDA graph: once the budget is full, every block has the same shapes.

A block appends, attends and evicts as any other call; the graph of it ends with copies of everything that it changed
into the tensors that it began with, so that it can be replayed. The positions come from a clock on the device. The
blocks until the budget is full are one call, and the last one is called.

Shapes: B sequences, m tokens of a block, V vocabulary.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.families import in_window, layout_of
from kvbench.cache.footprint import fed
from kvbench.engine.cuda_graph import GraphRecorder
from kvbench.engine.logits import next_logits
from kvbench.policies.policy import Policy, layer_budgets
from kvbench.policies.stores.slot_store import SlotStore

CALL_TOKENS = 8192  # prompt tokens of one call, over all sequences of a batch


def blocks_alike(policy: Policy) -> bool:
    """Whether every block of a prompt that finds a full budget does the same, without numbers that the host reads."""
    schedule, needs = policy.schedule, policy.needs
    if schedule.order != "attend_then_evict" or schedule.rerotate or policy.pre_pass is not None:
        return False
    if policy.reader is not None or policy.merger.merges or policy.allocator.per_head or policy.rates:
        return False
    return policy.evicts and not (needs.model or needs.memory or needs.question or needs.kept)


class BlockRecorder(GraphRecorder):
    """Runs the blocks of prompts: calls of the model, and replays of a recorded block."""

    names = "a block of a prompt", "blocks"

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        layout = layout_of(model.config)
        spread = getattr(model, "hf_device_map", None)
        super().__init__(model, strict)
        self._supported = not (layout.owners or layout.latent or layout.states or spread)
        self._cache: KVCache | None = None
        self.forget()

    def forget(self) -> None:
        """Free the recorded block."""
        self._cache, self._alike = None, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._before: object = None

    def first_call(self, cache: KVCache, size: int, total: int) -> int:
        """Tokens of the first call of a prompt of `total` tokens: all blocks of `size` tokens that evict nothing."""
        if not self._can_record(cache):
            return size
        try:
            budgets = chain(*(layer_budgets(one.policy, len(one.layers), total, 0) for one in cache.sequences))
            fit = min(*budgets, total, CALL_TOKENS // len(cache.sequences))
        except ValueError:  # a budget that is too small for its policy: the call ends that sequence
            return size
        fills = all(one.policy.schedule.share(fit, size, total) == fit for one in cache.sequences)
        return max(size, fit // size * size) if fills else size

    def __call__(self, ids: Tensor, positions: Tensor, cache: KVCache, last: bool) -> Tensor:
        """The logits [B,V] after a block ids [B,m] at positions [B,m]; last: of the prompt."""
        if cache is not self._cache:
            self.forget()
            self._cache = cache
        if last or not self._can_record(cache):
            self.forget()
            return self.call(ids, positions, cache)
        if self._graph is None and self._alike:
            self._graph = self._record(ids, cache)
        if self._graph is not None:
            self._ids.copy_(ids)
            self._graph.replay()
            for sequence in cache.sequences:
                sequence.tick(ids.shape[1])
                for layer in sequence.layers:
                    layer.footprint += fed(layer.count, ids.shape[1])
            return self._logits
        logits = self.call(ids, positions, cache)
        now = self._shapes(cache), ids.shape
        self._alike = self._alike + 1 if now == self._before and now[0] else 0
        self._before = now
        return logits

    def _can_record(self, cache: KVCache) -> bool:
        """Whether blocks of this cache may be recorded, if their shapes are equal."""
        if self.failed or not self._supported:
            return False
        return all(sequence.error is None and blocks_alike(sequence.policy) for sequence in cache.sequences)

    def _shapes(self, cache: KVCache) -> tuple[object, ...]:
        """The shapes of everything that a block changes; empty before every layer is full, in plain slots."""
        if in_window(self._model.config, cache.seen):  # attention does not need the window yet
            return ()
        for sequence in cache.sequences:
            if sequence.error is not None:
                return ()
            for layer in sequence.layers:
                store, budgets = layer.store, sequence.budgets
                full = budgets.within(layer.index, sequence.seen) == budgets.shares[layer.index] == layer.count
                plain = type(store) is SlotStore and store.starts is None and store.slots.packed
                if not (full and plain and layer.compacted):
                    return ()
        return tuple((x.shape, x.dtype) for x in _tensors(cache))

    def _record(self, ids: Tensor, cache: KVCache) -> torch.cuda.CUDAGraph | None:
        """Record a block, which computes nothing; None if that failed."""
        graph, before, held = torch.cuda.CUDAGraph(), _attributes(cache), list(_tensors(cache))
        self._ids, clock = ids.clone(), torch.full((1,), cache.seen, device=ids.device)
        try:
            for sequence in cache.sequences:
                sequence.clock = clock
            with self.capture(graph, cache):
                positions = (clock + torch.arange(ids.shape[1], device=ids.device)).expand_as(ids)
                self._logits = next_logits(self._model, self._ids, positions, cache)
                known = {x.untyped_storage().data_ptr() for x in held}
                found = [x.clone() if x.untyped_storage().data_ptr() in known else x for x in _tensors(cache)]
                for old, new in zip(held, found, strict=True):
                    old.copy_(new)
                clock += ids.shape[1]
        finally:
            for owner, attributes in before:
                vars(owner).clear()
                vars(owner).update(attributes)
        return graph if self._error is None else None


def _tensors(cache: KVCache) -> Iterator[Tensor]:
    """All tensors that a block changes."""
    for sequence in cache.sequences:
        yield from sequence.nan_flags.values()
        for layer in sequence.layers:
            assert isinstance(layer.store, SlotStore)
            yield from layer.store.memory.values()
            yield from layer.recent.held or ()


def _attributes(cache: KVCache) -> list[tuple[object, dict[str, Any]]]:
    """Everything that a call changes on the host: objects and copies of their attributes."""
    owners: list[object] = [cache]
    for sequence in cache.sequences:
        owners += [sequence, sequence.budgets]
        for layer in sequence.layers:
            owners += [layer, layer.recent, layer.store]
    return [(owner, {name: _copied(x) for name, x in vars(owner).items()}) for owner in owners]


def _copied(x: object) -> object:
    return x.copy() if isinstance(x, dict | list) else x

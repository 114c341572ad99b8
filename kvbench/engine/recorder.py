"""CUDA graphs of calls of the model: decoding steps, and blocks of a prompt at a full budget.

A call is recorded once and replayed for every equal call after it. It is recorded if it changes nothing but tensors on
the device, where they are: the second of two calls that left everything at its place. What the host counts follows
from the number of tokens. The first call is not recorded, so that all kernels are compiled and all constants are on the
device.

Shapes: P rows of a call, m tokens of a row, V vocabulary.
"""

import logging
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.families import in_window, layout_of
from kvbench.cache.footprint import fed
from kvbench.cache.layer import Layer
from kvbench.cache.memory import slot_store
from kvbench.engine.logits import next_logits
from kvbench.errors import first_line
from kvbench.policies.policy import Policy, layer_budgets
from kvbench.policies.stores.slot_store import SlotStore

log = logging.getLogger(__name__)

CALL_TOKENS = 8192  # prompt tokens of one call, over all sequences of a batch


def blocks_alike(policy: Policy) -> bool:
    """Whether every block of a prompt that finds a full budget does the same, without numbers that the host reads."""
    schedule, needs = policy.schedule, policy.needs
    if schedule.order != "attend_then_evict" or schedule.rerotate or policy.pre_pass is not None:
        return False
    if policy.reader is not None or policy.merger.merges or policy.allocator.per_head or policy.rates:
        return False
    return policy.evicts and not (needs.model or needs.memory or needs.question or needs.kept)


class Recorder:
    """Runs calls of the model, and replays of the last one.

    strict: raise ValueError if a call cannot be recorded; otherwise log one warning, and `failed` is true. An error
    inside a recording may be one of the call: the call that follows raises it.
    """

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        layout = layout_of(model.config)
        spread = getattr(model, "hf_device_map", None)
        self._model, self._strict = model, strict
        self._blocks = not (layout.owners or layout.latent or layout.states or spread)
        self.failed = False
        self._error: Exception | None = None  # of the last recording
        self.forget()

    def forget(self) -> None:
        """Free the recorded call."""
        self._last: tuple[object, ...] | None = None  # the cache of the last call, and where its tensors were
        self._graph: torch.cuda.CUDAGraph | None = None

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

    def __call__(self, tokens: Tensor, places: Tensor, cache: KVCache, last: bool = False) -> Tensor:
        """The logits [P,V] after tokens [P,m] at places [P,m]; valid until the next call. last: of a prompt."""
        now = None if last or self.failed else self._places_of(cache, tokens)
        if now is None or now != self._last:
            self.forget()
            self._last = now
        elif self._graph is None:
            self._graph = self._record(tokens, cache)
        if self._graph is None:
            return self._call(tokens, places, cache)
        self._tokens.copy_(tokens)
        self._graph.replay()
        _count(cache, tokens.shape[1])
        return self._logits

    def _can_record(self, cache: KVCache) -> bool:
        """Whether blocks of this cache may be recorded, if they leave everything at its place."""
        able = (one.error is None and blocks_alike(one.policy) for one in cache.sequences)
        return self._blocks and not self.failed and all(able)

    def _places_of(self, cache: KVCache, tokens: Tensor) -> tuple[object, ...] | None:
        """Where everything is that a call changes; None if a call like this one cannot be recorded."""
        if cache.tables.recordable:
            return cache, tokens.shape, cache.tables.version
        if not self._can_record(cache) or in_window(self._model.config, cache.seen):  # attention needs no window yet
            return None
        found: list[int] = []
        for sequence in cache.sequences:
            found += (flag.data_ptr() for flag in sequence.nan_flags.values())
            for layer in sequence.layers:
                if not layer.compacted:
                    return None
                store, budgets = layer.store, sequence.budgets
                full = budgets.within(layer.index, sequence.seen) == budgets.shares[layer.index] == layer.count
                if not full or type(store) is not SlotStore or store.starts is not None or not store.slots.packed:
                    return None
                found += (x.data_ptr() for x in (*store.memory.values(), *(layer.recent.held or ())))
        return cache, tokens.shape, *found

    def _record(self, tokens: Tensor, cache: KVCache) -> torch.cuda.CUDAGraph | None:
        """Record a call, which computes nothing; None if that failed."""
        self._tokens, graph, seen, decodes = tokens.clone(), torch.cuda.CUDAGraph(), cache.seen, cache.tables.recordable
        before, error = [] if decodes else _counts(cache), None
        self._clock = torch.full((1,), seen, device=tokens.device)  # tokens seen, which every replay counts on
        watchers = {sequence: sequence.watchers for sequence in cache.sequences}
        for sequence in watchers:
            sequence.watchers = []  # nothing is evicted
            sequence.clock = None if decodes else self._clock
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    places = cache.tables.positions if decodes else self._positions(tokens)
                    self._logits = next_logits(self._model, self._tokens, places, cache)
                    if not decodes:
                        self._clock += tokens.shape[1]
                except Exception as inside:  # the end of a recording that failed raises another one
                    error = inside
        except RuntimeError as outside:
            error = error or outside
        for sequence, own in watchers.items():
            error, sequence.error, sequence.watchers = error or sequence.error, None, own
        if decodes:
            cache.tables.count(seen - cache.seen)
        else:
            _undo(cache, seen, before)
        self._error = error
        return graph if error is None else None

    def _positions(self, tokens: Tensor) -> Tensor:
        """The positions of a block [P,m] by the clock on the device."""
        return (self._clock + torch.arange(tokens.shape[1], device=tokens.device)).expand_as(tokens)

    def _call(self, tokens: Tensor, places: Tensor, cache: KVCache) -> Tensor:
        """The logits of a call that is not recorded. If a recording failed and the call does not, it says so."""
        logits = next_logits(self._model, tokens, places, cache)
        error, self._error = self._error, None
        if error is not None and all(sequence.error is None for sequence in cache.sequences):
            call = "a decoding step" if tokens.shape[1] == 1 else "a block of a prompt"
            why = f"{call} on {type(self._model).__name__} cannot be recorded ({first_line(error)})"
            if self._strict:
                raise ValueError(f"{why}: use engine.cuda_graph=false") from error
            log.warning("%s: later ones are not recorded either", why)
            self.failed = True
        return logits


def _count(cache: KVCache, tokens: int) -> None:
    """Count a call that the device took: `tokens` of every sequence."""
    decodes = cache.tables.recordable
    if decodes:
        cache.tables.count(1)
    for sequence in cache.sequences:
        if not decodes:
            sequence.tick(tokens)
            for layer in sequence.layers:
                layer.footprint += fed(layer.count, tokens)
        sequence.show_evicted()


Counts = list[tuple[Layer, int, float, int, int, tuple[Tensor, Tensor] | None]]


def _counts(cache: KVCache) -> Counts:
    """What the host counts of every layer before a block."""
    found: Counts = []
    for layer in (layer for sequence in cache.sequences for layer in sequence.layers):
        store = slot_store(layer)
        found.append((layer, layer.count, layer.footprint, store.used, store.room, layer.recent.held))
    return found


def _undo(cache: KVCache, seen: int, before: Counts) -> None:
    """Take back what the host counted of a block that was recorded, or began to be: `seen` tokens are in."""
    for layer, count, footprint, used, room, held in before:
        layer.count, layer.footprint, layer.recent.held = count, footprint, held
        slot_store(layer).use(used, room)
    for sequence in cache.sequences:
        sequence.tick(seen - sequence.seen)
        sequence.clock = None
    cache.forget_call()

"""Rows whose layers look alike, as the sequences of one cache: they decode as a batch.

Their policies differ in the budget at most. A row at its budget looks like every other, however long its prompt was and
however much it holds. Joined, it holds what it held, and what it gives up is what it would give up alone; `picked`
takes it out again.
"""

from collections.abc import Callable, Hashable, Sequence

import torch

from kvbench.cache.budgets import Budgets
from kvbench.cache.kv_cache import KVCache
from kvbench.cache.layer import KVLayer
from kvbench.cache.recent_queries import RecentQueries
from kvbench.cache.steps import Progress
from kvbench.policies.stores.dense import DenseHeld
from kvbench.policies.stores.rows import RowsHeld
from kvbench.policies.stores.store import Held

Place = tuple[KVCache, int]
"""A sequence of a cache."""


def shape_of(cache: KVCache) -> Hashable:
    """What caches have in common that may be joined; None where a cache may not.

    Prompts have to be in, their evictions done; and what a policy tells its cache of each token, or its layers tell
    each other, is told to one sequence only.
    """
    policy, scorer = cache.policy, cache.policy.scorer
    if scorer is not None and (scorer.needs_surprisal or scorer.looks_back):
        return None
    evicts = policy.evicts and (policy.schedule.late or policy.schedule.decode == "evict")
    if evicts and not cache.at_budget:
        return None  # it would begin to evict at another step than those beside it
    layers = []
    for layer in cache.layers:
        if layer.held.shape is None or layer.unsettled:
            return None
        traces = tuple((name, x.shape[1:]) for name, x in layer.memory.items())
        layers.append((layer.held.shape, layer.recent.shape, traces))
    return type(cache), policy.apart_from_budget, tuple(layers)


def joined(caches: Sequence[KVCache]) -> tuple[KVCache, list[int]]:
    """One cache with the sequences of all, which have one shape and are not to be used any more.

    Sequences of one budget come to stand side by side. Also returns where each stood, counted through all caches.
    """
    places = [(cache, row) for cache in caches for row in range(cache.sequences)]
    order = sorted(range(len(places)), key=lambda index: _budget(places[index]))
    places = [places[index] for index in order]
    peaks = {cache: _peaks(cache) for cache in caches}

    def held(index: int) -> Held:
        rows = {cache: _rows(cache.layers[index]) for cache in caches}
        for cache in caches:
            cache.layers[index].let_go()  # only one layer is in memory twice
        return RowsHeld([rows[cache][row] for cache, row in places])

    found = _of_rows(places, held)
    found.peaks = [peaks[cache][row] for cache, row in places]
    return found, order


def picked(cache: KVCache, rows: Sequence[int]) -> KVCache:
    """A cache with some of the sequences of another, in rising order."""
    before = _peaks(cache)
    peaks = [before[row] for row in rows]
    found = _of_rows([(cache, row) for row in rows], lambda index: cache.layers[index].held.picked(rows))
    if len(rows) > 1:
        found.peaks = peaks
    else:
        found.peak_nbytes = max(found.nbytes, *peaks)  # among others it held no less from step to step
    return found


def _budget(place: Place) -> float:
    cache, row = place
    return cache.budgets.policy(row).budget or 0.0


def _rows(layer: KVLayer) -> list[DenseHeld]:
    """What a layer holds, by its sequences."""
    assert isinstance(layer.held, DenseHeld | RowsHeld)
    return layer.held.each()


def _peaks(cache: KVCache) -> list[int]:
    """The most bytes each sequence held so far: those of one length hold the same, those of several do not shrink."""
    now = 0 if any(isinstance(layer.held, RowsHeld) for layer in cache.layers) else cache.peak_nbytes // cache.sequences
    return [max(before, now) for before in cache.peaks or [0] * cache.sequences]


def _of_rows(places: Sequence[Place], held: Callable[[int], Held]) -> KVCache:
    """A cache with these sequences; held: what its layers hold, by their index."""
    first, row = places[0]
    found = type(first)(first.config, first.budgets.policy(row))
    progress = Progress.of_rows([(cache.progress, row) for cache, row in places])
    budgets = Budgets.of_rows([(cache.budgets, row) for cache, row in places], progress)
    layers = [_layer(found, index, places, held(index)) for index in range(len(first.layers))]
    found.take_over(progress, budgets, layers)
    return found


def _layer(found: KVCache, index: int, places: Sequence[Place], held: Held) -> KVLayer:
    rows = [(cache.layers[index], row) for cache, row in places]
    recent = RecentQueries.of_rows([(layer.recent, row) for layer, row in rows])
    first = rows[0][0]
    memory = {name: torch.stack([layer.memory[name][row] for layer, row in rows]) for name in first.memory}
    return first.like(found, index, held, recent, memory, [layer.counts[row] for layer, row in rows])

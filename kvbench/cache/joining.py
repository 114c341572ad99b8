"""Examples under one policy whose layers look alike, as the sequences of one cache: they decode as a batch.

A row at its budget looks like every other, however long its prompt was; where an allocator gave its layers other shares
of it, the shorter ones are filled up with empty slots. Joined, it holds what it held, and what it gives up is what it
would give up alone; `picked` takes it out again.
"""

from collections.abc import Hashable, Sequence

import torch

from kvbench.cache.kv_cache import KVCache
from kvbench.cache.layer import KVLayer


def shape_of(cache: KVCache) -> Hashable:
    """What caches have in common that may be joined; None where a cache may not.

    Prompts have to be in, their evictions done; and what a policy tells its cache of each token, or its layers tell
    each other, is told to one sequence only.
    """
    policy, scorer = cache.policy, cache.policy.scorer
    if scorer is not None and (scorer.needs_surprisal or scorer.looks_back):
        return None
    if policy.schedule.late and not cache.at_budget:
        return None
    layers = []
    for layer in cache.layers:
        if layer.held.shape is None or layer.unsettled:
            return None
        traces = tuple((name, x.shape[1:]) for name, x in layer.memory.items())
        layers.append((layer.held.shape, layer.recent.shape, traces))
    return type(cache), id(policy), tuple(layers)


def joined(caches: Sequence[KVCache]) -> KVCache:
    """One cache with the sequences of all, which have one shape and are not to be used any more."""
    first, *others = caches
    found = _empty(first)
    progress = first.progress.joined([other.progress for other in others])
    budgets = first.budgets.joined([other.budgets for other in others], progress)
    layers = zip(*(cache.layers for cache in caches), strict=True)
    found.take_over(progress, budgets, [_joined(found, index, some) for index, some in enumerate(layers)])
    found.peaks = [peak for cache in caches for peak in _peaks(cache)]
    return found


def picked(cache: KVCache, rows: Sequence[int]) -> KVCache:
    """A cache with some of the sequences of another, in tensors of its own."""
    found = _empty(cache)
    progress = cache.progress.picked(rows)
    layers = [_picked(found, index, layer, rows) for index, layer in enumerate(cache.layers)]
    found.take_over(progress, cache.budgets.picked(rows, progress), layers)
    peaks = [_peaks(cache)[row] for row in rows]
    if len(rows) > 1:
        found.peaks = peaks
    else:
        found.peak_nbytes = max(found.nbytes, *peaks)  # among others it held no less from step to step
    return found


def _peaks(cache: KVCache) -> list[int]:
    """The most bytes each sequence held so far: those of one length hold the same, those of several do not grow."""
    even = all(layer.held.even for layer in cache.layers)
    now = cache.peak_nbytes // cache.sequences if even else 0
    return [max(before, now) for before in cache.peaks or [0] * cache.sequences]


def _empty(like: KVCache) -> KVCache:
    return type(like)(like.config, like.policy)


def _joined(cache: KVCache, index: int, layers: Sequence[KVLayer]) -> KVLayer:
    first, *others = layers
    held = first.held.joined([other.held for other in others])
    recent = first.recent.joined([other.recent for other in others])
    memory = {name: torch.cat([layer.memory[name] for layer in layers]) for name in first.memory}
    counts = [count for layer in layers for count in layer.counts]
    return first.like(cache, index, held, recent, memory, counts)


def _picked(cache: KVCache, index: int, layer: KVLayer, rows: Sequence[int]) -> KVLayer:
    chosen = list(rows)
    memory = {name: x[chosen] for name, x in layer.memory.items()}
    counts = [layer.counts[row] for row in rows]
    return layer.like(cache, index, layer.held.picked(rows), layer.recent.picked(rows), memory, counts)

"""Sequences that join a batch and leave it: whatever their policies, budgets and lengths.

Sequences whose policies differ in the budget at most are one group where their layers look alike: one at its budget
looks like every other, however long its prompt was and however much it holds. What each holds and evicts is what it
would alone.
"""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import fields
from itertools import chain

import torch

from kvbench.cache.budgets import Budgets
from kvbench.cache.cache import KVCache
from kvbench.cache.group import PolicyGroup, same
from kvbench.cache.state import LayerState, RecentQueries
from kvbench.cache.steps import Progress
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.store_list import StoreList, each_sequence

Place = tuple[PolicyGroup, int]
"""A sequence of a group."""


def empty_like(cache: KVCache) -> KVCache:
    """A cache of the same kind, for the same model, without a sequence."""
    found = type(cache)(cache.config, Policy(name="full"))
    found.groups.clear()
    return found


def fork(cache: KVCache) -> KVCache:
    """The same cache once more, with tensors of its own: each of the two can be asked another question."""
    cache.on_device(False)
    shared = [cache.config, *chain.from_iterable((group.policy, group.error) for group in cache.groups)]
    return copy.deepcopy(cache, {id(part): part for part in shared})


def join(cache: KVCache) -> list[int]:
    """Bring groups that look alike together; returns where in the cache each of its sequences stood before."""
    cache.on_device(False)
    starts, first = {}, 0
    for group in cache.groups:
        starts[group], first = first, first + group.size
    alike: dict[Hashable, list[PolicyGroup]] = {}
    while cache.groups:  # whatever is joined takes its place in memory before the next one is
        group = cache.groups.pop(0)
        shape = _shape(group)
        alike.setdefault(id(group) if shape is None else shape, []).append(group)
    order = []
    for some in alike.values():
        places = [(group, row) for group in some for row in range(group.size)]
        if len(some) > 1:
            places.sort(key=_budget)
        order += [starts[group] + row for group, row in places]
        cache.groups.append(_joined(cache, places) if len(some) > 1 else some[0])
        some.clear()
    return order


def together(caches: Sequence[KVCache], one_prompt: bool = False) -> KVCache:
    """One cache for the next calls of the model, with the very sequences of several.

    one_prompt: all read one and the same sequence, a whole prompt as one step that attends before it evicts.
    """
    for cache in caches:
        cache.on_device(False)
    found = empty_like(caches[0])
    found.groups += [group for cache in caches for group in cache.groups]
    found.one_prompt = one_prompt
    return found


def pick(cache: KVCache, sequences: Sequence[int]) -> KVCache:
    """A cache with some of the sequences of another, in rising order."""
    cache.on_device(False)
    found = empty_like(cache)
    first = 0
    for group in cache.groups:
        rows = [place - first for place in sequences if first <= place < first + group.size]
        if rows:
            found.groups.append(group if len(rows) == group.size else _picked(cache, group, rows))
        first += group.size
    return found


def copied(cache: KVCache, place: int) -> KVCache:
    """A cache with a copy of one sequence of another, whose batch on the device goes on with all of them."""
    assert cache.batch is not None
    group, row, layers = cache.batch.copied(place)
    found = empty_like(cache)
    found.groups.append(_picked(cache, group, [row], layers))
    return found


def _shape(group: PolicyGroup) -> Hashable:
    """What groups have in common that may be joined; None where a group may not.

    Prompts have to be in, their evictions done; and what a policy tells its group of each token, or its layers tell
    each other, is about one sequence only.
    """
    policy = group.policy
    if group.error is not None or policy.rates or policy.needs.kept or policy.reader is not None:
        return None
    evicts = policy.evicts and (policy.schedule.late or policy.schedule.decode == "evict")
    if evicts and (policy.schedule.every > 1 or not group.at_budget):
        return None  # it would evict at other steps than those beside it
    layers = []
    for layer in group.layers:
        shape = layer.store.shape if isinstance(layer.store, SlotStore | StoreList) else None
        if shape is None or layer.unsettled:
            return None
        traces = tuple((name, x.shape[1:]) for name, x in layer.memory.items())
        layers.append((shape, layer.recent.shape, traces))
    states = tuple((name, state.shape[1:]) for name, state in group.states.items())
    return (
        same(*(getattr(policy, part.name) for part in fields(policy) if part.name != "budget")),
        tuple(layers),
        states,
    )


def _joined(cache: KVCache, places: Sequence[Place]) -> PolicyGroup:
    """One group with the sequences of several, which have one shape and are not to be used any more."""
    groups = list(dict.fromkeys(group for group, _ in places))
    peaks = {group: _peaks(group) for group in groups}

    def held(index: int) -> LayerStore:
        rows = {group: each_sequence(group.layers[index].give_away()) for group in groups}  # one layer at a time
        return StoreList.decoding([rows[group][row] for group, row in places])

    layers = [_layer(index, places, held(index)) for index in range(len(groups[0].layers))]
    found = _of_places(cache, places, layers)
    found.peaks = [peaks[group][row] for group, row in places]
    return found


def _picked(
    cache: KVCache, group: PolicyGroup, rows: Sequence[int], copies: list[LayerState] | None = None
) -> PolicyGroup:
    """Some of the sequences of a group; copies: of their layers, where the group goes on with its own."""
    before, places = _peaks(group), [(group, row) for row in rows]
    peaks = [before[row] for row in rows]

    def held(index: int) -> LayerStore:
        store = group.layers[index].store
        assert isinstance(store, SlotStore | StoreList)
        return store.picked(rows)

    layers = copies or [_layer(index, places, held(index)) for index in range(len(group.layers))]
    found = _of_places(cache, places, layers)
    if len(rows) > 1:
        found.peaks = peaks
    else:
        found.peak_nbytes = max(found.peak_nbytes, *peaks)  # in the batch it held no less from step to step
    return found


def _budget(place: Place) -> float:
    group, row = place
    return group.budgets.policy(row).budget or 0.0


def _peaks(group: PolicyGroup) -> list[int]:
    """The most bytes each sequence held so far: those of one length hold the same, those of several do not shrink."""
    several = any(isinstance(layer.store, StoreList) for layer in group.layers)
    now = 0 if several else group.peak_nbytes // group.size
    return [max(before, now) for before in group.peaks or [0] * group.size]


def _of_places(cache: KVCache, places: Sequence[Place], layers: list[LayerState]) -> PolicyGroup:
    """A group with these sequences, whose layers are these."""
    first, row = places[0]
    found = PolicyGroup(cache.config, first.budgets.policy(row), None)
    found.isolated = first.isolated
    progress = Progress.of_rows([(group.progress, row) for group, row in places])
    budgets = Budgets.of_rows([(group.budgets, row) for group, row in places], progress)
    states = {name: torch.stack([group.states[name][row] for group, row in places]) for name in first.states}
    found.take(progress, budgets, layers, states)
    return found


def _layer(index: int, places: Sequence[Place], held: LayerStore) -> LayerState:
    rows = [(group.layers[index], row) for group, row in places]
    recent = RecentQueries.of_rows([(layer.recent, row) for layer, row in rows])
    first = rows[0][0]
    memory = {name: torch.stack([layer.memory[name][row] for layer, row in rows]) for name in first.memory}
    return first.like(held, recent, memory, [layer.counts[row] for layer, row in rows])

"""Several caches as one for the next calls of a model, and some of its sequences as a cache again.

The engine has one sequence per group, so that sequences are added and removed without a copy.
"""

import copy
from collections.abc import Sequence
from itertools import chain

from kvbench.cache.cache import KVCache
from kvbench.policies.policy import Policy


def empty_like(cache: KVCache) -> KVCache:
    """A cache of the same kind for the same model, without sequences."""
    found = type(cache)(cache.config, Policy(name="full"))
    found.groups.clear()
    return found


def fork(cache: KVCache) -> KVCache:
    """A copy of a cache with its own tensors, so that each can continue with another question."""
    cache.on_device(False)
    shared = [cache.config, *chain.from_iterable((group.policy, group.error) for group in cache.groups)]
    return copy.deepcopy(cache, {id(part): part for part in shared})


def together(caches: Sequence[KVCache], one_prompt: bool = False) -> KVCache:
    """One cache with the sequences of several, which it does not copy.

    one_prompt: all groups process one and the same sequence, a whole prompt as one step that attends before it evicts.
    """
    for cache in caches:
        cache.on_device(False)
    found = empty_like(caches[0])
    found.groups += [group for cache in caches for group in cache.groups]
    found.one_prompt = one_prompt
    return found


def pick(cache: KVCache, places: Sequence[int]) -> KVCache:
    """A cache with the groups at some places of another."""
    cache.on_device(False)
    found = empty_like(cache)
    found.groups += [cache.groups[place] for place in places]
    return found


def copied(cache: KVCache, place: int) -> KVCache:
    """A cache with a copy of one sequence of another, whose batch on the device continues with all of them."""
    assert cache.batch is not None
    found = empty_like(cache)
    found.groups.append(cache.batch.copied(cache.groups[place]))
    return found


def join(cache: KVCache) -> list[int]:
    """Sort the groups so that equal rules are neighbours, and return the former place of each."""
    rules = {group.rule: place for place, group in reversed(list(enumerate(cache.groups)))}
    order = sorted(range(len(cache.groups)), key=lambda place: rules[cache.groups[place].rule])
    if order != list(range(len(order))):
        cache.on_device(False)
        cache.groups[:] = [cache.groups[place] for place in order]
    return order

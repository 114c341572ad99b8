"""Several caches as one for the next calls of a model, and copies of a cache.

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
    shared = [cache.config, *chain.from_iterable((group.policy, group.error) for group in cache.groups)]
    return copy.deepcopy(cache, {id(part): part for part in shared})


def together(caches: Sequence[KVCache], one_prompt: bool = False) -> KVCache:
    """One cache with the sequences of several, which it does not copy.

    one_prompt: all groups process one and the same sequence, a whole prompt as one step that attends before it evicts.
    """
    found = empty_like(caches[0])
    found.groups += [group for cache in caches for group in cache.groups]
    found.one_prompt = one_prompt
    return found

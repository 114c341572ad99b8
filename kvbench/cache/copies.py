"""Several caches as one, and copies of a cache."""

import copy
from collections.abc import Sequence

from kvbench.cache.cache import KVCache
from kvbench.cache.tables import leave_tables
from kvbench.policies.policy import Policy


def empty_like(cache: KVCache) -> KVCache:
    """A cache of the same kind for the same model, without sequences."""
    found = type(cache)(cache.config, Policy(name="full"))
    found.sequences.clear()
    return found


def fork(cache: KVCache) -> KVCache:
    """A copy of a cache with its own tensors, so that each can continue with another question."""
    leave_tables(cache.sequences)
    shared = [cache.config, *(part for one in cache.sequences for part in (one.policy, one.error))]
    return copy.deepcopy(cache, {id(part): part for part in shared})


def together(caches: Sequence[KVCache], one_prompt: bool = False) -> KVCache:
    """One cache with the sequences of several, which it does not copy.

    one_prompt: all sequences process one and the same prompt, as one step that attends before it evicts.
    """
    found = empty_like(caches[0])
    found.join(sequence for cache in caches for sequence in cache.sequences)
    found.one_prompt = one_prompt
    return found

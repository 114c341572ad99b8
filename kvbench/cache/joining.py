"""Which sequences can decode in a `kvbench.cache.table.Table`, and with which others."""

from collections.abc import Sequence

from kvbench.cache import attend
from kvbench.cache.budgets import ENDLESS
from kvbench.cache.layer import Layer
from kvbench.cache.memory import slot_store
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.policy import Policy
from kvbench.policies.stores.ring_layout import RingLayer
from kvbench.policies.stores.slot_store import SlotStore


def steps_alike(policy: Policy) -> bool:
    """Whether decoding steps of a policy are equal: each appends a token, and evicts one, or none.

    A sequence that evicts `every` tokens at once leaves its table for that, and enters it again.
    """
    schedule = policy.schedule
    if policy.reader is not None:
        return False
    if not policy.decoding_evicts:
        return True
    if policy.needs.hidden or schedule.rerotate:
        return False
    return schedule.evicts_last and (schedule.every == 1 or not policy.allocator.per_head)


def can_record(policy: Policy) -> bool:
    """Whether a decoding step of this policy depends only on the token and changes only tensors on the device."""
    needs = policy.needs
    if policy.rates or policy.granularity == "query_head" or not policy.store.replayable or not steps_alike(policy):
        return False
    return not policy.decoding_evicts or (policy.store.exact and not (needs.model or needs.memory or needs.question))


def can_join(sequence: CachedSequence) -> bool:
    """Whether a table can take the next step of a sequence."""
    policy, evicting = sequence.policy, sequence.policy.decoding_evicts
    if sequence.error is not None or sequence.within_call or not sequence.decodes or not steps_alike(policy):
        return False
    if sequence.shares_layers and not policy.store.exact:  # layers that read others have no form of codes
        return False
    layers = sequence.layers
    if len({tuple(layer.memory) for layer in layers}) > 1:  # a merger has not seen all layers yet
        return False
    if evicting and policy.allocator.per_head and not sequence.at_budget:  # its KV heads do not grow alike
        return False
    if not all(layer.opened and not layer.unsettled and layer.ranking is None for layer in layers):
        return False
    if not all(_can_enter(sequence, layer) for layer in layers):
        return False
    if evicting and policy.needs.kept and len(sets_of(layers)) > 1:  # one set evicts before the next
        return False
    return len({slot_store(layer).first.device for layer in layers}) == 1


def _can_enter(sequence: CachedSequence, layer: Layer) -> bool:
    """Whether a layer can be in a table."""
    store, policy = layer.store, sequence.policy
    if not isinstance(store, SlotStore) or store.step_format is None:
        return False
    if isinstance(store, RingLayer) and not (policy.store.replayable or attend.backend_of(store.like).reads_at_once):
        return False
    if store.starts is None and not store.slots.packed and store.free is None:
        return False
    if policy.decoding_evicts:
        if not (policy.store.exact or attend.backend_of(store.like).evicts_codes):
            return False
        if not layer.recent.full or slots_to_grow(sequence, layer) < (0 if policy.schedule.one_each else 2):
            return False
        if policy.merger.needs.memory and not layer.memory:  # its thresholds begin with its first eviction
            return False
    return True


def sets_of(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """The layers of equal shapes, which are in one set of a table."""
    alike: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault((_format(layer)[1:], layer.query_heads), []).append(index)
    return [tuple(some) for some in alike.values()]


def _format(layer: Layer) -> tuple[object, ...]:
    """The format of a layer's store, and its number of KV heads."""
    store = slot_store(layer)
    assert store.step_format is not None
    return *store.step_format, (store.first if store.starts is None else store.starts).shape[1]


def format_of(sequence: CachedSequence) -> object:
    """The format of every layer; sequences of equal formats share a table."""
    return tuple(map(_format, sequence.layers))


def slots_to_grow(sequence: CachedSequence, layer: Layer, used: int | None = None) -> int:
    """Slots that a layer takes until it evicts, one token after each new one or `every` at once. used: slots in use."""
    if not sequence.policy.decoding_evicts:
        return ENDLESS
    store = slot_store(layer)
    if sequence.policy.allocator.per_head:
        return 0 if store.free is not None else 1
    most = sequence.budgets.shares[layer.index] + sequence.policy.schedule.every
    return most - (store.used if used is None else used)

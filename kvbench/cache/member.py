"""A sequence of a table: what the host knows about its segments between two updates."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.cache.budgets import ENDLESS
from kvbench.cache.group import Kind, kind_of
from kvbench.cache.joining import slots_to_grow
from kvbench.cache.layer import Layer
from kvbench.cache.memory import slot_store
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.stores.ring_layout import RingLayer


@dataclass(eq=False)
class Member:
    """A sequence of the table, and its row in a step.

    used: slots in use of each layer, `steps` steps ago, when the lengths of its stores were last updated. longest:
    bound of the length of its segments. room: steps until a store needs more slots. due: until it evicts `every` tokens
    at once, outside of the table.
    """

    sequence: CachedSequence
    layers: Sequence[Layer]
    used: list[int]
    kind: Kind
    longest: int
    room: int
    due: int
    row: int = -1
    steps: int = 0


def member_of(sequence: CachedSequence, layers: Sequence[Layer]) -> Member:
    """A sequence as its stores are now."""
    room, longest, due, seldom = ENDLESS, 0, ENDLESS, not sequence.policy.schedule.one_each
    for layer in layers:
        store, grow = slot_store(layer), slots_to_grow(sequence, layer)
        longest = max(longest, store.used + min(grow, store.room))
        if grow > store.room:
            room = min(room, store.room)
        if sequence.policy.decoding_evicts and seldom:
            due = min(due, grow - 1)
        if isinstance(store, RingLayer):
            room = min(room, store.steps_until_due)
    longest = 1 << (longest - 1).bit_length()  # so that it seldom changes
    kind = kind_of(sequence, longest) if sequence.policy.decoding_evicts else Kind()
    used = [slot_store(layer).used for layer in layers]
    return Member(sequence, layers, used, kind, kind.slots or longest, room, due)

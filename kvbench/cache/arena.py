"""The arenas of a `DeviceBatch`: flat memory for the slots of many sequences, one arena per layer.

A sequence has one range of slots in every layer, with a segment for each KV head. Its range does not move while other
sequences come and go, so that recorded CUDA graphs stay valid. An arena that is too small is copied into a larger one,
one layer after another, so that only one layer exists twice at a time.

Shapes: L layers, N slots of the largest arena, H KV heads, G' statistics of a slot, G = H_q / H, D head dim.
"""

from collections.abc import Iterator
from collections.abc import Sequence as List

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.sequence import Sequence
from kvbench.policies.policy import Policy
from kvbench.policies.stores.column_layer import ColumnLayer
from kvbench.policies.stores.slot_store import SlotStore

ENDLESS = 1 << 30  # slots that a sequence may take if it does not evict
EMPTY, PADDING, FIRST = 0, 1, 2  # slots: always empty, written by padding, the first one of sequences
LARGER = 1.5  # size of an arena that replaces one, at least


def evicts(policy: Policy) -> bool:
    """Whether decoding evicts."""
    return policy.evicts and policy.schedule.decode == "evict"


def steps_alike(policy: Policy) -> bool:
    """Whether all decoding steps of a policy are equal: each appends a token, and evicts one or none."""
    if policy.granularity == "query_head" or policy.reader is not None or policy.merger.needs.bias or policy.rates:
        return False
    if evicts(policy) and not policy.store.exact:
        return False
    needs = policy.needs
    return not evicts(policy) or (policy.schedule.one_each and not (needs.model or needs.memory or needs.question))


def can_join(sequence: Sequence) -> bool:
    """Whether a `DeviceBatch` can take the next step of a sequence."""
    policy, evicting = sequence.policy, evicts(sequence.policy)
    if sequence.error is not None or sequence.within_call or not steps_alike(policy):
        return False
    if len({tuple(layer.memory) for layer in sequence.layers}) > 1:  # a merger has not seen all layers yet
        return False
    if evicting and policy.allocator.per_head and not sequence.at_budget:  # its KV heads do not grow alike
        return False
    shapes = set()
    for layer in sequence.layers:
        store = layer.store if layer.opened and not layer.unsettled else None
        if not isinstance(store, SlotStore | ColumnLayer) or store.step_format is None:
            return False
        if isinstance(store, ColumnLayer):
            tail = store.parts[0].columns[0].tail.view("x")
            shapes.add((*store.step_format[1:], tail.shape[1], tail.device))
            continue
        if store.starts is None and not store.slots.packed and store.free is None:
            return False
        if evicting and (not layer.recent.full or slots_to_grow(sequence, layer) < 0):
            return False
        if evicting and policy.merger.merges and store.free is None:  # its thresholds begin with its first eviction
            return False
        dims, heads = store.step_format[1:], store.first.shape[1] if store.starts is None else 0
        shapes.add((*dims, heads, store.first.device))
    return len(shapes) == 1


def step_formats(sequence: Sequence) -> list[object]:
    """The format of every layer; sequences of equal formats share an arena."""
    stores = (layer.store for layer in sequence.layers)
    return [store.step_format for store in stores if isinstance(store, SlotStore | ColumnLayer)]


def slot_store(layer: Layer) -> SlotStore:
    """The store of a layer that can be in an arena."""
    assert isinstance(layer.store, SlotStore)
    return layer.store


def slots_to_grow(sequence: Sequence, layer: Layer) -> int:
    """Slots that a layer takes until each new token replaces an evicted one."""
    if not evicts(sequence.policy):
        return ENDLESS
    if sequence.policy.allocator.per_head:
        return 0 if slot_store(layer).free is not None else 1
    return sequence.budgets.shares[layer.index] + 1 - slot_store(layer).used


class Arena:
    """The arenas of all layers, empty at first, and alike in shapes and dtypes.

    memory: keys and values, or their codes, of each layer by name, [N,...] or shorter. positions [L,N] int32, -1 =
    empty; statistics [L,N,G'] by name and G'; weights [L,N,G]: attention of the newest queries, if a policy uses it.
    offsets [L,1,1]: of the layers in these
    tensors. version: changes with the addresses.
    """

    def __init__(self, layers: int) -> None:
        self.memory: list[dict[str, Tensor]] = []
        self.positions = torch.full((layers, FIRST), -1, dtype=torch.int32)
        self.offsets = torch.zeros(layers, 1, 1, dtype=torch.long)
        self.statistics: dict[tuple[str, int], Tensor] = {}
        self.weights: Tensor | None = None
        self.version = 0
        self._held: list[dict[Layer, range]] = [{} for _ in range(layers)]

    def start(self, layer: Layer) -> int:
        """The first slot of a sequence in a layer."""
        return self._held[layer.index][layer].start

    def segments(self, sequence: Sequence) -> Iterator[Tensor]:
        """Starts, slots in use, next free slot and limit of a sequence's segments, [L,H] each."""
        stores = [slot_store(layer) for layer in sequence.layers]
        if all(store.starts is None and store.free is None for store in stores):  # the host has all numbers
            numbers = []
            for layer, store in zip(sequence.layers, stores, strict=True):
                first, (heads, slots) = self.start(layer), store.first.shape[1:3]
                used, grow = [store.used] * heads, slots_to_grow(sequence, layer)
                begins = [first + head * slots for head in range(heads)]
                numbers.append([begins, used, used, [store.used + grow] * heads])
            yield from torch.tensor(numbers, device=stores[0].first.device).unbind(1)
            return
        segments = []
        for layer, store in zip(sequence.layers, stores, strict=True):
            starts, counts, free = store.segments()
            segments.append((starts + self.start(layer), counts, free, counts + slots_to_grow(sequence, layer)))
        yield from map(torch.cat, zip(*segments, strict=True))

    def collect_weights(self, heads: int) -> None:
        """Store the attention of the newest queries, of `heads` query heads per KV head, from now on."""
        if self.weights is None:
            self.weights = torch.zeros(*self.positions.shape, heads, device=self.positions.device)

    def hold(self, index: int, layers: List[Layer]) -> None:
        """Move the slots of sequences in one layer into its arena. Layers are held in order the first time."""
        held, new, first = self._held[index], dict[Layer, range](), slot_store(layers[0])
        if index == len(self.memory):
            self.positions = self.positions.to(first.first.device)
            dims = 3 if first.starts is None else 1
            empty = {name: x.new_zeros(FIRST, *x.shape[dims:]) for name, x in first.token_memory.items()}
            self.memory.append(empty)
        for layer in layers:
            new[layer] = _gap([*held.values(), *new.values()], slot_store(layer).capacity)
        end = max(slots.stop for slots in new.values())
        size = len(next(iter(self.memory[index].values())))
        if end > size:
            self._enlarge(index, max(end, int(LARGER * size)))
        held.update(new)
        for layer in layers:
            store = slot_store(layer)
            for name, x in store.memory.items():
                if name not in ("positions", *self.memory[index]):
                    self.statistics.setdefault((name, x.shape[-1]), x.new_zeros(*self.positions.shape, x.shape[-1]))
        pairs = []
        for layer in layers:
            before, slots = slot_store(layer), new[layer]
            pairs.append((self.positions[index, slots.start : slots.stop], before.slot_positions().flatten()))
            self._view(layer)
            after = slot_store(layer).memory
            pairs += [(after[name], x) for name, x in before.memory.items() if name != "positions"]
        self.copy(pairs)

    @staticmethod
    def copy(pairs: List[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair into the first, with one launch for those of a dtype."""
        equal: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for pair in pairs:
            equal.setdefault(pair[0].dtype, []).append(pair)
        for some in equal.values():
            torch._foreach_copy_([into for into, _ in some], [x for _, x in some])

    def release(self, layer: Layer, last: bool = False) -> None:
        """Free the slots of a sequence in a layer; and the memory of the layer, if it is the last one."""
        del self._held[layer.index][layer]
        if last:
            memory = self.memory[layer.index]
            memory.update({name: x.new_empty(0, *x.shape[1:]) for name, x in memory.items()})

    def _enlarge(self, index: int, slots: int) -> None:
        """Copy the arena of a layer into a larger one. Small tensors are enlarged for all layers."""
        self.memory[index] = {name: _longer(x, slots, 0) for name, x in self.memory[index].items()}
        changed = [index]
        if slots > self.positions.shape[1]:
            changed = list(range(len(self.memory)))
            self.positions = _longer(self.positions, slots, 1, fill=-1)
            self.offsets = torch.arange(len(self.offsets), device=self.positions.device)[:, None, None] * slots
            self.statistics = {name: _longer(x, slots, 1) for name, x in self.statistics.items()}
            self.weights = None if self.weights is None else _longer(self.weights, slots, 1)
        self.version += 1
        for layer in (layer for index in changed for layer in self._held[index]):
            self._view(layer)

    def _view(self, layer: Layer) -> None:
        """Give a layer a store whose memory are views of the arena, where its tokens are, or will be copied."""
        index, here, store = layer.index, self._held[layer.index][layer], slot_store(layer)
        slots, memory = slice(here.start, here.stop), {}
        for name, x in store.memory.items():
            whole = self.memory[index].get(name)
            if whole is None:
                whole = (self.positions if name == "positions" else self.statistics[name, x.shape[-1]])[index]
            memory[name] = whole[slots].view(x.shape)
        layer.store = store.with_memory(memory, store.free)


def _gap(taken: List[range], slots: int) -> range:
    """The first range of free slots; it may exceed the arena."""
    begin = FIRST
    for other in sorted(taken, key=lambda other: other.start):
        if begin + slots <= other.start:
            break
        begin = other.stop
    return range(begin, begin + slots)


def _longer(x: Tensor, slots: int, dim: int, fill: int = 0) -> Tensor:
    """A copy of x that has more slots in one dimension."""
    shape = list(x.shape)
    shape[dim] = slots
    longer = x.new_full(shape, fill)
    longer.narrow(dim, 0, x.shape[dim]).copy_(x)
    return longer

"""Flat memory for the slots of many sequences, one for each layer.

A sequence has one range of slots in every layer, with a segment for each KV head. Its range does not move while other
sequences come and go, so that recorded CUDA graphs stay valid. Memory that is too small is copied into a larger one,
one layer after another, so that only one layer exists twice at a time.

Shapes: L layers, N slots of the largest layer, H KV heads, G' statistics of a slot, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import copy_each

EMPTY, PADDING, RESERVED = 0, 1, 2  # slots of kernels: always empty, written by padding; the number of them


def slot_store(layer: Layer) -> SlotStore:
    """The store of a layer that can be in flat memory."""
    assert isinstance(layer.store, SlotStore)
    return layer.store


class FlatMemory:
    """The slots of some layers, which are alike in shapes and dtypes; empty at first.

    Layers are numbered among these (`place`); layers: their numbers among all attention layers.

    tensors: keys and values, or their codes, of each layer by name, [N,...] or shorter. positions [L,N] int32, -1 =
    empty; statistics, and a bias, [L,N,G'] by name and G'; weights [L,N,G]: attention of the newest queries, if a
    policy uses it.
    offsets [L,1,1]: of the layers in these tensors. growth: how many times as large new memory is at least. reserved:
    number of slots before those of sequences. version: changes with the addresses. each: tokens that share an entry of
    a tensor, by name; segments start at whole entries.
    """

    def __init__(self, layers: Sequence[int], growth: float, reserved: int) -> None:
        self._place = {index: place for place, index in enumerate(layers)}
        self.tensors: list[dict[str, Tensor]] = []
        self.positions = torch.full((len(layers), reserved), -1, dtype=torch.int32)
        self.offsets = torch.zeros(len(layers), 1, 1, dtype=torch.long)
        self.statistics: dict[tuple[str, int], Tensor] = {}
        self.weights: Tensor | None = None
        self.version = 0
        self._growth, self._reserved = growth, reserved
        self._each: dict[str, int] = {}
        self._held: list[dict[Layer, range]] = [{} for _ in layers]

    def start(self, layer: Layer) -> int:
        """The first slot of a sequence in a layer."""
        return self._held[self._place[layer.index]][layer].start

    def positions_of(self, layer: Layer) -> Tensor:
        """The positions of a sequence's slots in a layer: a view [n]."""
        place = self._place[layer.index]
        here = self._held[place][layer]
        return self.positions[place, here.start : here.stop]

    @property
    def bias(self) -> Tensor | None:
        """The bias of every slot [L,N], if a merger fitted one."""
        found = self.statistics.get(("bias", 1))
        return None if found is None else found[..., 0]

    @property
    def used_share(self) -> float:
        """The share of the slots of the first layer that sequences have."""
        size = self._size(0) if self.tensors else 0
        return sum(map(len, self._held[0].values())) / max(size, 1)

    def _size(self, place: int) -> int:
        """The slots of a layer."""
        name, x = next(iter(self.tensors[place].items()))
        return len(x) * self._each[name]

    def collect_weights(self, heads: int) -> None:
        """Store the attention of the newest queries, of `heads` query heads per KV head, from now on."""
        if self.weights is None:
            self.weights = torch.zeros(*self.positions.shape, heads, device=self.positions.device)

    def hold(self, place: int, layers: Sequence[Layer]) -> None:
        """Move the slots of sequences in one layer into its memory. Layers are held in order the first time."""
        held, new, first = self._held[place], dict[Layer, range](), slot_store(layers[0])
        if place == len(self.tensors):
            self.positions = self.positions.to(first.first.device)
            dims = 3 if first.starts is None else 1
            self._each |= {name: first.tokens_of(name) for name in first.token_memory}
            empty = {name: x.new_zeros(0, *x.shape[dims:]) for name, x in first.token_memory.items()}
            self.tensors.append(empty)
        unit = max(self._each[name] for name in self.tensors[place])
        begin = -(-self._reserved // unit) * unit
        for layer in layers:
            taken = [*held.values(), *new.values()]
            new[layer] = _gap(taken, slot_store(layer).capacity, begin)
        end, size = max(slots.stop for slots in new.values()), self._size(place)
        if end > size:
            self._enlarge(place, max(end, int(self._growth * size) // unit * unit))
        held.update(new)
        for layer in layers:
            store = slot_store(layer)
            for name, x in store.memory.items():
                if name not in ("positions", *self.tensors[place]):
                    width = _width(store, x)
                    self.statistics.setdefault((name, width), x.new_zeros(*self.positions.shape, width))
        pairs = []
        for layer in layers:
            before, slots = slot_store(layer), new[layer]
            pairs.append((self.positions[place, slots.start : slots.stop], before.slot_positions().flatten()))
            self._view(layer)
            after = slot_store(layer).memory
            pairs += [(after[name], x) for name, x in before.memory.items() if name != "positions"]
        copy_each(pairs)

    def release(self, layer: Layer, last: bool = False) -> None:
        """Free the slots of a sequence in a layer; and the memory of the layer, if it is the last one."""
        place = self._place[layer.index]
        del self._held[place][layer]
        if last:
            memory = self.tensors[place]
            memory.update({name: x.new_empty(0, *x.shape[1:]) for name, x in memory.items()})

    def _enlarge(self, place: int, slots: int) -> None:
        """Copy the memory of a layer into a larger one. Small tensors are enlarged for all layers."""
        longer = {name: _longer(x, slots // self._each[name], 0) for name, x in self.tensors[place].items()}
        self.tensors[place] = longer
        changed = [place]
        if slots > self.positions.shape[1]:
            changed = list(range(len(self.tensors)))
            self.positions = _longer(self.positions, slots, 1, fill=-1)
            self.offsets = torch.arange(len(self.offsets), device=self.positions.device)[:, None, None] * slots
            self.statistics = {name: _longer(x, slots, 1) for name, x in self.statistics.items()}
            self.weights = None if self.weights is None else _longer(self.weights, slots, 1)
        self.version += 1
        for layer in (layer for place in changed for layer in self._held[place]):
            self._view(layer)

    def _view(self, layer: Layer) -> None:
        """Give a layer a store whose memory are views of the flat memory, where its tokens are, or will be copied."""
        place, store = self._place[layer.index], slot_store(layer)
        slots, memory = self._held[place][layer], {}
        for name, x in store.memory.items():
            whole, each = self.tensors[place].get(name), self._each.get(name, 1)
            if whole is None:
                whole = (self.positions if name == "positions" else self.statistics[name, _width(store, x)])[place]
            memory[name] = whole[slots.start // each : slots.stop // each].view(x.shape)
        layer.store = store.with_memory(memory, store.free)


def _width(store: SlotStore, x: Tensor) -> int:
    """Numbers of a slot in a statistic of a store, or in its bias."""
    return x.numel() // max(1, store.capacity)


def _gap(taken: Sequence[range], slots: int, begin: int) -> range:
    """The first range of free slots, from slot `begin` on; it may exceed the memory."""
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

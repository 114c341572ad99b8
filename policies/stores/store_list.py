"""Several stores of one layer seen as one: the sequences of all, one after another.

Sequences that decode as one batch over different numbers of slots lie in flat memory, so that a token enters all of
them in one operation. Stores whose quantised groups span a whole sequence are one for each sequence.

Shapes: B sequences of all, H KV heads, C slots of the longest sequence, N flat slots, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from kvbench.kernels.references import append
from kvbench.policies.observation import AttentionParams, Observation, State
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import biases, padded
from kvbench.policies.stores.store import LayerStore

Open = Callable[[Tensor, Tensor, tuple[str, ...], int], LayerStore]


def open_per_sequence(
    open_one: Open, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int
) -> LayerStore:
    """One store per sequence, opened by `open_one`; without a list where there is one sequence only."""
    rows = [open_one(keys[b : b + 1], values[b : b + 1], statistics, width) for b in range(keys.shape[0])]
    return rows[0] if len(rows) == 1 else StoreList(rows)


def lay_out(
    groups: Sequence[Sequence[SlotStore]], rooms: Sequence[int]
) -> tuple[dict[str, Tensor], list[SlotStore], Tensor]:
    """Copy groups of stores of one length into flat memory, each group as one store with `room` more slots per segment.

    Returns the memory {name: [N,...]}, the stores, and where their segments begin, [B,H,1].
    """
    first = groups[0][0].memory
    sizes = [
        sum(store.slots for store in group) + room * sum(store.memory["positions"][..., :1].numel() for store in group)
        for group, room in zip(groups, rooms, strict=True)
    ]
    ends = list(accumulate(sizes))
    flat = {name: x.new_empty(ends[-1], *x.shape[3:]) for name, x in first.items()}
    stores, starts = [], []
    for group, room, begin, end in zip(groups, rooms, [0, *ends], ends, strict=False):
        whole = _stacked(group)
        stores.append(laid_out(whole, {name: x[begin:end] for name, x in flat.items()}, room))
        starts.append(stores[-1].segments().starts + begin)
    return flat, stores, torch.cat(starts)[..., None]


def laid_out(store: SlotStore, flat: Mapping[str, Tensor], room: int = 0) -> SlotStore:
    """The same tokens in flat memory {name: [N,...]}, which has `room` more slots for every segment."""
    assert store.starts is None or room == 0
    memory = {}
    store.positions  # noqa: B018 - read, it also marks which slots are free
    for name, x in store.memory.items():
        if store.starts is None:
            memory[name] = flat[name].view(*x.shape[:2], store.used + store.room + room, *x.shape[3:])
            memory[name][:, :, : x.shape[2]] = x
            memory[name][:, :, x.shape[2] :] = -1 if name == "positions" else 0
        else:
            memory[name] = flat[name].copy_(x)
    held = store.with_memory(memory, store.free)
    held.room, held.lent = store.room + room, False
    return held


def _stacked(group: Sequence[SlotStore]) -> SlotStore:
    """The sequences of stores of one length as one store."""
    first = group[0]
    if len(group) == 1:
        return first
    for store in group:
        store.positions  # noqa: B018 - asked for, it also marks which slots are free
    free = [store.free for store in group if store.free is not None]
    memory = {name: torch.cat([store.memory[name] for store in group]) for name in first.memory}
    whole = first.with_memory(memory, torch.cat(free) if free else None)
    whole._ascending = all(store.ascending for store in group)
    return whole


class StoreList(LayerStore):
    """Stores as one; the views are copies, in which shorter sequences end in empty slots."""

    _memory: Mapping[str, Tensor] | None = None  # flat, in which all members lie that decode as one batch
    _starts: Tensor | None = None  # [B,H,1] where their segments begin there

    def __init__(self, members: Sequence[LayerStore]) -> None:
        self.members = list(members)
        self._sizes = [len(held.positions) for held in members]  # sequences of each

    @property
    def rows(self) -> list[slice]:
        """The sequences of each member."""
        return [slice(end - size, end) for end, size in zip(accumulate(self._sizes), self._sizes, strict=True)]

    @classmethod
    def decoding(cls, stores: Sequence[SlotStore]) -> StoreList:
        """Sequences that decode as one batch, stores of one `shape`; neighbours of one length become one member."""
        alike = [list(group) for _, group in groupby(stores, key=lambda store: (store.used, store.room))]
        memory, members, starts = lay_out(alike, [0] * len(alike))
        found = cls(members)
        found._memory, found._starts = memory, starts
        return found

    @property
    def by_length(self) -> list[tuple[slice, SlotStore]]:
        """The members and their rows, of sequences that decode as one batch."""
        return [(rows, held) for rows, held in zip(self.rows, self.members, strict=True) if isinstance(held, SlotStore)]

    # --- what is held ----------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return padded([held.keys for held in self.members])

    @property
    def values(self) -> Tensor:
        return padded([held.values for held in self.members])

    @property
    def positions(self) -> Tensor:
        return padded([held.positions for held in self.members], fill=-1)

    @property
    def bias(self) -> Tensor | None:
        return biases([(held.bias, held.positions) for held in self.members])

    @property
    def state(self) -> State:
        states = [held.state for held in self.members]
        return {name: padded([state[name] for state in states]) for name in states[0]}

    def remember(self, state: State) -> None:
        for rows, held in zip(self.rows, self.members, strict=True):
            own = held.state
            for name, x in own.items():
                x.copy_(state[name][rows, :, : x.shape[2]])
            held.remember(own)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.members)

    @property
    def spare_nbytes(self) -> int:
        return sum(held.spare_nbytes for held in self.members)

    def parts(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for held in self.members:
            sizes.update(held.parts())
        return dict(sizes)

    def expect(self, tokens: int) -> None:
        for held in self.members:
            held.expect(tokens)

    @property
    def evicted(self) -> bool:  # type: ignore[override]
        return any(held.evicted for held in self.members)

    @property
    def packed(self) -> bool:
        members = self.members
        return all(held.packed for held in members) and len({held.positions.shape[2] for held in members}) == 1

    @property
    def ascending(self) -> bool:
        return all(held.ascending for held in self.members)

    # --- tokens ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        if self._memory is not None:
            self._append_one(keys, values, positions)
            return
        for rows, held in zip(self.rows, self.members, strict=True):
            own = keys[rows], values[rows], positions[rows]
            if absent:
                real = (own[2] >= 0).any(0).nonzero()[:, 0]
                own = own[0][:, :, real], own[1][:, :, real], own[2][:, real]
            if own[2].shape[1]:
                held.append(*own, absent=False)

    def _append_one(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """A token of every sequence, in one operation."""
        assert keys.shape[2] == 1, "sequences of a batch take one token each"
        stores = [held for _, held in self.by_length]
        if stores[0].free is None and stores[0].room == 0:
            rooms = [held.growth() for held in stores]
            self._memory, stores, self._starts = lay_out([[held] for held in stores], rooms)
            self.members = list(stores)
        assert self._memory is not None
        assert self._starts is not None
        slots = torch.cat([held.enter() for held in stores])
        tokens = {"keys": keys, "values": values, "positions": positions[:, None].expand(-1, keys.shape[1], -1)}
        append(self._memory, tokens, self._starts[..., 0], slots[..., 0])
        for held in stores:
            held.filled()

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        kept = []
        for rows, held in zip(self.rows, self.members, strict=True):
            own = mask[rows, :, : held.positions.shape[2]]
            kept.append(held.keep(own, spare, None if counts is None else counts[rows]))
        self._memory = self._starts = None
        return padded(kept)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "a bias is written to stores of single sequences"
        for rows, held in zip(self.rows, self.members, strict=True):
            own = slots[rows], keys[rows], values[rows]
            if self._memory is None:  # slots named beyond a shorter sequence's own are padding, made by `keep`
                real = (own[0] < held.positions.shape[2]).flatten(0, 1).all(0).nonzero()[:, 0]
                own = own[0][:, :, real], own[1][:, :, real], own[2][:, :, real]
            held.write(*own)

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        for own, held in zip(self.rows, self.members, strict=True):
            some = None if rows is None or all(rows[own]) else rows[own]
            if some is None or any(some):
                held.release(slots[own], some)

    def settle(self) -> None:
        for held in self.members:
            held.settle()

    @property
    def watching(self) -> bool:  # type: ignore[override]
        return any(held.watching for held in self.members)

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:
        for rows, held in zip(self.rows, self.members, strict=True):
            if held.watching and bool((observation.query_positions[rows] >= 0).any()):
                held.observe(of_rows(observation, rows, held.positions.shape[2]), prompts[rows])

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._memory is not None:
            return None
        outputs = []
        for rows, held in zip(self.rows, self.members, strict=True):
            output = held.attend(queries[rows], positions[rows], how)
            if output is None:
                return None
            outputs.append(output)
        return torch.cat(outputs)

    # --- sequences -------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> Hashable:
        """See `SlotStore.shape`."""
        return None if self._memory is None else self.by_length[0][1].shape

    def picked(self, rows: Sequence[int]) -> LayerStore:
        """Some of the sequences that decode as one batch, rising, copied out of the memory of the others."""
        chosen = [
            held.picked([row - own.start for row in rows if own.start <= row < own.stop])
            for own, held in self.by_length
            if any(own.start <= row < own.stop for row in rows)
        ]
        return chosen[0] if len(rows) == 1 else StoreList.decoding(chosen)


def each_sequence(held: LayerStore) -> list[SlotStore]:
    """What a layer holds by its sequences, in the same memory."""
    stores = [store for _, store in held.by_length] if isinstance(held, StoreList) else [held]
    slots = [store for store in stores if isinstance(store, SlotStore)]
    return [store.picked(slice(row, row + 1)) for store in slots for row in range(len(store.positions))]


def of_rows(observation: Observation, rows: slice, slots: int) -> Observation:
    """What some sequences of an observation show of their first `slots` slots."""
    return replace(
        observation,
        queries=observation.queries[rows],
        query_positions=observation.query_positions[rows],
        keys=observation.keys[rows, :, :slots],
        values=observation.values[rows, :, :slots],
        positions=observation.positions[rows, :, :slots],
        seen=observation.seen[rows],
        window=None,
        known={},
    )

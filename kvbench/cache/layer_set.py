"""The layers of equal shapes in a table: their memory, and what the device has about every row.

Each layer has one flat memory (`kvbench.cache.memory`). Every KV head of every sequence has a segment of it; the start,
the number of slots in use and the next free slot of a segment are numbers on the device. So one layer of a step is an
append and an attention for all sequences, of any policy, budget and length. After the last layer, sequences of one rule
evict together (`kvbench.cache.group`). How attention and evictions read the slots is up to a backend
(`kvbench.cache.attend`).

Shapes: L layers of the set, P rows of a step, b of them in a group, H_q query heads, H KV heads, D head dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache import attend
from kvbench.cache.attend import LayerStep
from kvbench.cache.device_groups import STATE, bind, note_codes, ring_state, unbind
from kvbench.cache.group import WINDOW, Group, Kind, groups_of
from kvbench.cache.joining import slots_to_grow
from kvbench.cache.layer import Layer
from kvbench.cache.member import Member
from kvbench.cache.memory import PADDING, FlatMemory, slot_store
from kvbench.cache.sequence import CachedSequence
from kvbench.kernels.references import NewTokens
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import CODED, take_places
from kvbench.policies.stores.ring_layout import RingLayer
from kvbench.policies.stores.slots import copy_each
from kvbench.policies.stores.token_codes import TokenCodeLayer

LENGTHS = "starts", "counts", "free", "limit", "nan", "next", "advance", "clipped", *STATE

RowState = dict[str, Tensor]
"""What the device has about the row of a sequence, [L or 1,...] by name: `LENGTHS`, windows and memory of parts."""


class LayerSet:
    """layers: which ones of the attention layers. lengths: what the device has about all rows: `starts`, `counts`,
    `free`, `limit` [L,P,H]: the start of a segment, its slots in use, and the slot of the next token when `limit` are
    in use; `nan` [L,P]: whether a score was NaN; `next` [1,P,1]: positions of the next tokens; `advance` [1,P,1]: 1, 0
    for padding; `clipped` [L,P]: numbers beyond the limit of fixed scales; and `STATE`.
    """

    def __init__(self, layers: Sequence[int], like: Sequence[Layer]) -> None:
        """like: all layers of a sequence."""
        own = [slot_store(like[index]) for index in layers]
        self.layers = tuple(layers)
        self.backend = attend.backend_of(own[0].like)
        self.memory = FlatMemory(self.layers, self.backend.growth, self.backend.reserved)
        self.lengths: RowState = {}
        self._codecs: list[Coding | None] = [getattr(store, "codec", None) for store in own]  # None: exact
        self._groups: list[Group] = []
        self._attended: list[LayerStep] = []  # the layers so far
        self._new = self._gone = torch.zeros(0)  # [L,P,H] the slots of new tokens, and of those they displace in a ring

    def of(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers of the set, of all those of a sequence."""
        return [layers[index] for index in self.layers]

    # --- rows --------------------------------------------------------------------------------------------------------
    def hold(self, sequences: Sequence[CachedSequence]) -> None:
        """Move the slots of sequences into the flat memory."""
        for place, index in enumerate(self.layers):
            self.memory.hold(place, [sequence.layers[index] for sequence in sequences])

    def lengthen(self, member: Member) -> None:
        """Give a sequence more slots in the layers where it has none left, and will need them."""
        for place, layer in enumerate(self.of(member.layers)):
            if slots_to_grow(member.sequence, layer) > 0 and slot_store(layer).room == 0:
                self.memory.release(layer)
                slot_store(layer).reserve()
                self.memory.hold(place, [layer])
                member.sequence.note_bytes(layer.index)
        starts, *_ = self._segments(member.sequence, self.of(member.layers))
        self.lengths["starts"][:, member.row] = starts

    def new_state(self, sequence: CachedSequence) -> RowState:
        """The state of a sequence whose slots are in the flat memory, from its layers."""
        layers = self.of(sequence.layers)
        state = dict(zip(LENGTHS, self._segments(sequence, layers), strict=False))
        state["nan"] = state["starts"].new_zeros(len(layers), dtype=torch.bool)
        state["next"], state["advance"] = (state["starts"].new_tensor([x]) for x in ([sequence.seen], [1]))
        if isinstance(codes := layers[0].store, TokenCodeLayer) and codes.clipped is not None:
            state["clipped"] = torch.zeros_like(state["nan"], dtype=torch.int64)
        if not sequence.policy.decoding_evicts:
            return state if self.backend.reads_at_once else state | ring_state(layers)
        if sequence.policy.needs.newest_row:
            self.backend.collect_weights(self.memory, layers[0].query_heads // state["starts"].shape[1])
        windows = [layer.recent.held for layer in layers if layer.recent.held is not None]
        if windows:
            state |= {name: torch.cat([window[i] for window in windows]) for i, name in enumerate(WINDOW)}
        return state | {name: torch.cat([layer.memory[name] for layer in layers]) for name in layers[0].memory}

    def _segments(self, sequence: CachedSequence, layers: Sequence[Layer]) -> Iterator[Tensor]:
        """Starts, slots in use, next free slot and limit of a sequence's segments, [L,H] each."""
        stores = [slot_store(layer) for layer in layers]
        if all(store.starts is None and store.free is None for store in stores):  # the host has all numbers
            numbers = []
            for layer, store in zip(layers, stores, strict=True):
                first, heads = self.memory.start(layer), store.first.shape[1]
                slots = store.capacity // heads
                used, grow = [store.used] * heads, slots_to_grow(sequence, layer)
                begins = [first + head * slots for head in range(heads)]
                numbers.append([begins, used, used, [store.used + grow] * heads])
            yield from torch.tensor(numbers, device=stores[0].first.device).unbind(1)
            return
        segments = []
        for layer, store in zip(layers, stores, strict=True):
            starts, counts, free = store.segments()
            segments.append((starts + self.memory.start(layer), counts, free, counts + slots_to_grow(sequence, layer)))
        yield from map(torch.cat, zip(*segments, strict=True))

    def state(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Everything that the device has about a row, by name: views [L or 1,...]."""
        for name, x in self.lengths.items():
            yield name, x[:, row]
        for group in self._groups:
            if group.has(row):
                for name, x in group.state.items():
                    yield name, x[:, row - group.rows.start]

    def write(self, row: int, state: RowState) -> None:
        """Write the state of a row."""
        for name, x in self.state(row):
            x.copy_(state[name])

    def bind(self, member: Member) -> None:
        """Give the layers of a sequence views of their windows and memories, which its group changes."""
        state, layers = dict(self.state(member.row)), self.of(member.layers)
        bind(layers, state)
        _bind(layers, state)

    def arrange(self, kinds: Sequence[Kind], rows: Sequence[RowState]) -> None:
        """Make these the rows of a step, sorted by what evicts together."""
        self.lengths = {name: torch.stack([one[name] for one in rows], 1) for name in LENGTHS if name in rows[0]}
        self._new, self._gone = torch.zeros_like(self.lengths["free"]), torch.zeros_like(self.lengths["free"])
        self._groups = []
        for some in groups_of(kinds):
            own = [name for name in rows[some.start] if name not in LENGTHS]
            state = {name: torch.stack([one[name] for one in rows[some]], 1) for name in own}
            self._groups.append(Group(self.layers, kinds[some], some, self.memory, self.lengths, state))

    def free(self, member: Member, copies: bool, last: bool) -> dict[int, Tensor]:
        """Return the layers of a sequence, as they would be without the table; copies: in memory of their own.

        last: it is the only sequence. Returns by layer whether a score was NaN, [1] bool.
        """
        layers, state = self.of(member.layers), {name: x.clone() for name, x in self.state(member.row)}
        self._return(layers, member.row, copies)
        for layer in layers:
            self.memory.release(layer, last)
        _bind(layers, state)
        if "clipped" in state:
            for layer, clipped in zip(layers, state["clipped"].tolist(), strict=True):
                if isinstance(layer.store, TokenCodeLayer) and layer.store.clipped is not None:
                    layer.store.clipped += clipped
        return dict(zip(self.layers, state["nan"][:, None], strict=True))

    def _return(self, layers: Sequence[Layer], row: int, copies: bool) -> None:
        """Give the layers of a row their stores, as they would be without the table; copies: of all tensors."""
        pairs = []
        for place, layer in enumerate(layers):
            store = slot_store(layer)
            memory = dict(store.memory)
            if copies:
                memory = {name: torch.empty_like(x) for name, x in store.memory.items()}
                pairs += [(memory[name], x) for name, x in store.memory.items()]
            free = None if store.free is None else self.lengths["free"][place, row].clone()[None, :, None]
            counts = None if store.counts is None else self.lengths["counts"][place, row].clone()[None]
            layer.store = store.with_memory(memory, free, counts)
        copy_each(pairs)
        unbind(layers)

    def follow(self, member: Member, steps: int) -> None:
        """Bring the lengths that the host has of a sequence's layers up to date, after `steps` steps."""
        sequence, row = member.sequence, member.row
        for place, layer in enumerate(self.of(member.layers)):
            if sequence.policy.decoding_evicts:
                layer.decided = sequence.seen
            store, grow = slot_store(layer), slots_to_grow(sequence, layer, member.used[layer.index])
            taken = min(steps, grow)
            layer.took(steps, taken, grow)
            member.used[layer.index] += taken
            free = self.lengths["free"][place, row][None, :, None] if taken == grow else None
            counts = None if store.counts is None else self.lengths["counts"][place, row][None]
            fills = free is not None and store.free is None
            if isinstance(store, RingLayer):
                store.follow(member.used[layer.index], sequence.seen - steps)
            else:
                store.grown(member.used[layer.index], taken, free, counts)
            if fills:
                sequence.note_bytes(layer.index)

    def settle(self, member: Member) -> None:
        """End the steps of a sequence: its layers code what is due, in place."""
        state = {name: self.lengths[name][:, member.row] for name in STATE if name in self.lengths}
        for place, layer in enumerate(self.of(member.layers)):
            store = layer.store
            before = store.in_codes if isinstance(store, RingLayer) else None
            try:
                store.settle()
            except ValueError as error:  # numbers that are not finite
                member.sequence.fail(error)
            if isinstance(store, RingLayer):
                if state and store.in_codes != before:
                    note_codes(store, state, place, self.memory.positions_of(layer))
                member.sequence.note_bytes(layer.index)

    # --- a step ------------------------------------------------------------------------------------------------------
    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [P,1]."""
        return self.lengths["next"][0]

    @property
    def is_done(self) -> bool:
        """Whether all layers have attended in the running step."""
        return len(self._attended) == len(self.layers)

    def begin(self, rows: Sequence[Sequence[Layer]]) -> None:
        """Take a slot for the next token of every row in all layers. rows: their layers; none for padding."""
        memory, lengths = self.memory, self.lengths
        self._attended.clear()
        grows = lengths["counts"] < lengths["limit"]
        torch.where(grows, lengths["counts"], lengths["free"], out=self._new)
        lengths["counts"] += grows
        if (codec := self._codecs[0]) is not None and CODED in lengths:
            take_places(lengths, codec.most_exact, memory.positions, memory.offsets, PADDING, (self._new, self._gone))
        else:
            there = (lengths["starts"] + memory.offsets + self._new).flatten()
            memory.positions.view(-1).scatter_(0, there, lengths["next"].int().expand_as(self._new).flatten())
            for x in memory.statistics.values():
                x.flatten(0, 1).index_fill_(0, there, 0)
            if memory.weights is not None:
                memory.weights.zero_()
        self.backend.begin(memory, lengths, [self.of(layers) if layers else () for layers in rows])

    def attend(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, longest: int, params: AttentionParams
    ) -> Tensor:
        """Append keys and values [P,H,1,D] of a layer and attend: [P,H_q,1,D]. longest: bound of a segment's length."""
        place, heads = self.layers.index(index), self._new.shape[2]
        if keys.shape[1] != heads:  # each query head keeps its own tokens
            keys, values = (x.repeat_interleave(heads // keys.shape[1], dim=1) for x in (keys, values))
        tokens = NewTokens(keys, values, self._new[place])
        step = LayerStep(place, queries, tokens, self._gone[place], self.positions, longest, params)
        self._attended.append(step)
        return self.backend.attend(step, self.memory, self.lengths, self._codecs[place])

    def read(self, index: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of another layer's queries [P,H_q,1,D] to the tokens of a layer that has attended."""
        place = self.layers.index(index)
        step = replace(self._attended[place], queries=queries, params=params, appended=True)
        return self.backend.attend(step, self.memory, self.lengths, self._codecs[place])

    def evict(self, members: Sequence[Member]) -> None:
        """End a step: evict after its last layer."""
        how = [step.params for step in self._attended]
        newest = torch.stack([step.queries for step in self._attended]) if self._groups else self._attended[0].queries
        self._attended = []
        for group in self._groups:
            own = sorted((one for one in members if group.has(one.row)), key=lambda one: one.row)
            try:
                group.evict(newest[:, group.rows], how, self.backend, [member.sequence for member in own])
            except Exception as error:
                for member in own:
                    member.sequence.fail(error)
        self.lengths["next"] += self.lengths["advance"]
        self.backend.end()

    @property
    def is_broken(self) -> bool:
        """Whether a score was NaN; the host waits for the device."""
        return bool(self.lengths["nan"].any())

    def note_broken(self, member: Member) -> None:
        """Note the first layer with a NaN score of a sequence, if it has one."""
        flags, sequence = self.lengths["nan"][:, member.row], member.sequence
        if bool(flags.any()):
            first = self.layers[int(flags.to(torch.uint8).argmax())]
            sequence.nan_layer = first if sequence.nan_layer is None else min(first, sequence.nan_layer)
            flags.fill_(False)


def padding(state: RowState) -> RowState:
    """The state of an empty place where one with this state may be: one slot in use, overwritten by every token."""
    slots = {"starts": PADDING, "counts": 1, "limit": 1}
    return {name: torch.full_like(x, slots.get(name, 0)) for name, x in state.items()}


def _bind(layers: Sequence[Layer], state: Mapping[str, Tensor]) -> None:
    """Give the layers of a set their windows and memories, [L,...] by name."""
    for place, layer in enumerate(layers):
        if WINDOW[0] in state:
            layer.recent.bind(*(state[name][place, None] for name in WINDOW))
        layer.memory |= {name: state[name][place, None] for name in layer.memory if name in state}

"""The table of the sequences that decode together: one token of each in every call, with few operations per layer.

Each layer has one flat memory (`kvbench.cache.memory`). Every KV head of every sequence has a segment of it; the start,
the number of slots in use and the next free slot of a segment are numbers of the table, on the device. So one layer of
a step is an append and an attention for all sequences, of any policy, budget and length. After the last layer,
sequences of one rule evict together (`kvbench.cache.group`). A sequence below its budget grows to one
slot more than its budget; then every new token replaces an evicted one. The host only counts steps, so that a step can
be recorded as a CUDA graph. How attention and evictions read the slots is up to a backend (`kvbench.cache.attend`).

A step has one row for each place of a sequence. Sequences of one `Kind` differ in nothing that a recorded step has as a
constant. If steps are recorded (`pads`), a sequence that is admitted takes the place of a finished one of its kind, so
that the graph stays valid: a kind then has 1, 2, 4, 8, 16, 24, 32 and so on places, and empty places are padding: they
write to a slot of their own, append one token after another there, and are not read. Places are arranged anew, and
steps recorded anew, when a kind needs more of them, and when most of them are empty. If budgets are shares of the
prompt or measured on it, every prompt is a kind of its own.

Shapes: L layers, P rows of a step, b of them in a group, H_q query heads, H KV heads, D head dim.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache import attend
from kvbench.cache.attend import Backend, LayerStep
from kvbench.cache.device_groups import STATE, bind, note_codes, ring_state, unbind
from kvbench.cache.footprint import decoded
from kvbench.cache.group import WINDOW, Group, Kind, groups_of
from kvbench.cache.joining import format_of, slots_to_grow
from kvbench.cache.layer import Layer
from kvbench.cache.member import Member, member_of
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

TIGHT = 0.9  # share of flat memory above which sequences that leave together keep it

RowState = dict[str, Tensor]
"""What the device has about the row of a sequence, [L or 1,...] by name: `LENGTHS`, windows and memory of parts."""


def bucket(sequences: int) -> int:
    """The number of places for this many sequences of a kind: the next one of 1, 2, 4, 8, 16, 24, 32 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


class Table:
    """Sequences of one format of stores that decode together.

    Between `admit` and `free`, only the table changes the layers of a sequence. lengths: data on the device about all
    rows: `starts`, `counts`, `free`, `limit` [L,P,H]: the start of a segment, its slots in use, and the slot of the
    next token when `limit` are in use; `nan` [L,P]: whether a score was NaN; `next` [1,P,1]: positions of the next
    tokens; `advance` [1,P,1]: 1, 0 for padding; `clipped` [L,P]: numbers beyond the limit of fixed scales; and `STATE`.
    pads: rows may be padding.
    """

    def __init__(self, layers: int, pads: bool) -> None:
        self._layers, self._pads = layers, pads
        self._members: dict[CachedSequence, Member] = {}
        self._arrangements = 0
        self._clear()

    def _clear(self) -> None:
        self.backend: Backend | None = None
        self._memory = FlatMemory(self._layers, 1.0, 0)
        self._new = self._gone = torch.zeros(0)
        self.format: object = None  # of the layers; one for all sequences
        self._codecs: list[Coding | None] = []  # of the layers; None: keys and values as they are
        self._longest = 0  # bound of the length of a segment
        self._kinds: list[Kind] = []  # of the rows
        self._empty: dict[Kind, RowState] = {}  # of padding
        self._groups: list[Group] = []
        self._attended: list[LayerStep] = []  # the layers so far
        self.lengths: RowState = {}

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when a recorded step is not valid any more."""
        return self._arrangements, self._longest, self._memory.version

    @property
    def rows(self) -> list[CachedSequence | None]:
        """The sequence of every row of a step; None for padding."""
        of_rows = {member.row: sequence for sequence, member in self._members.items()}
        return [of_rows.get(row) for row in range(len(self._kinds))]

    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [P,1]."""
        return self.lengths["next"][0]

    # --- sequences come and go -------------------------------------------------------------------------------------
    def admit(self, joining: Sequence[CachedSequence]) -> None:
        """Before every step: take over sequences of the table's format, and lengthen stores without free slots."""
        states: dict[CachedSequence, RowState] = {}
        for member in self._members.values():
            if member.steps == member.room:
                states |= self._lengthen(member)
        if joining:
            self.format = self.format or format_of(joining[0])
            joining = [one for one in joining if format_of(one) == self.format]
        if joining:
            states |= self._enter(joining)
        taken = {member.row for member in self._members.values()}
        for sequence, state in states.items():
            member = self._members[sequence]
            empty = (row for row, kind in enumerate(self._kinds) if kind == member.kind and row not in taken)
            member.row = next(empty, -1)
            if member.row >= 0:
                taken.add(member.row)
                self._write(member.row, state)
                self._bind(member)
        spare = len(self._kinds) - len(self._members)
        if any(member.row < 0 for member in self._members.values()) or spare > len(self._members) * self._pads:
            self._arrange(states)
        self._longest = max([self._longest, *(member.longest for member in self._members.values())])

    def evicts_next(self, sequence: CachedSequence) -> bool:
        """Whether a sequence evicts several tokens at once after its next token, which it does outside of the table."""
        member = self._members[sequence]
        return member.steps >= member.due

    def free(self, sequence: CachedSequence, copies: bool = True) -> None:
        """Return a sequence's layers, as they would be without the table; copies: in memory of their own."""
        with torch.inference_mode(self.positions.is_inference()):  # only in that mode, such tensors can be changed
            self._free(self._members[sequence], copies)

    @property
    def is_tight(self) -> bool:
        """Whether nearly all of the flat memory is that of its sequences, so that they can stay there."""
        return self._memory.used_share > TIGHT

    def free_all(self) -> None:
        """Return the layers of all sequences, which stay where they are: no sequence takes their slots any more."""
        for sequence in list(self._members):
            self.free(sequence, copies=False)

    def _free(self, member: Member, copies: bool) -> None:
        sequence = member.sequence
        self.update(sequence)
        state = {name: x.clone() for name, x in self._state(member.row)}
        clipped = state["clipped"].tolist() if "clipped" in state else []
        self._return(member, copies)
        for layer in member.layers:
            self._memory.release(layer, last=len(self._members) == 1)
            self._bind_layer(layer, state)
            if isinstance(layer.store, TokenCodeLayer) and layer.store.clipped is not None:
                layer.store.clipped += clipped[layer.index]
            sequence.note_bytes(layer.index)
        codes = member.layers[-1].store  # they had the newest token twice
        sequence.note(beside=codes.step_nbytes if isinstance(codes, TokenCodeLayer) else 0)
        sequence.nan_flags = dict(enumerate(state["nan"][:, None]))
        sequence.states = {name: x.clone() for name, x in sequence.states.items()}
        self._pad(member)
        del self._members[sequence]
        sequence.table = None
        if not self._members:
            self._clear()

    def count(self, steps: int) -> None:
        """Count steps that the device took; negative to undo."""
        for member in self._members.values():
            member.steps += steps
            member.sequence.tick(steps)

    def _enter(self, sequences: Sequence[CachedSequence]) -> dict[CachedSequence, RowState]:
        """Move the layers of sequences into the flat memory; returns the states of their rows."""
        for sequence in sequences:
            for layer in sequence.layers:
                if sequence.policy.decoding_evicts:
                    slot_store(layer).store_positions()
                if slots_to_grow(sequence, layer) > 0:
                    slot_store(layer).reserve()
                    sequence.note_bytes(layer.index)
        if self.backend is None:
            self.backend = attend.backend_of(slot_store(sequences[0].layers[0]).like)
            self._memory = FlatMemory(self._layers, self.backend.growth, self.backend.reserved)
        for index in range(self._layers):
            self._memory.hold(index, [sequence.layers[index] for sequence in sequences])
        states = {}
        self._codecs = [getattr(layer.store, "codec", None) for layer in sequences[0].layers]
        for sequence in sequences:
            layers = sequence.layers
            states[sequence] = state = self._new_state(sequence, layers)
            self._members[sequence] = member = member_of(sequence, layers)
            sequence.table = self
            self._note_padding(member.kind, state)
            if member.kind.policy.needs.newest_row:
                self.backend.collect_weights(self._memory, layers[0].query_heads // state["starts"].shape[1])
        return states

    def _lengthen(self, member: Member) -> dict[CachedSequence, RowState]:
        """Give a sequence more slots where it has none; returns its state if it needs a place of another kind."""
        sequence = member.sequence
        self.update(sequence)
        for layer in member.layers:
            if slots_to_grow(sequence, layer) > 0 and slot_store(layer).room == 0:
                self._memory.release(layer)
                slot_store(layer).reserve()
                self._memory.hold(layer.index, [layer])
                sequence.note_bytes(layer.index)
        new = self._new_state(sequence, member.layers)
        self.lengths["starts"][:, member.row] = new["starts"]
        now = member_of(sequence, member.layers)
        member.longest, member.room, member.due, member.used = now.longest, now.room, now.due, now.used
        if now.kind == member.kind:
            return {}
        state = {name: x.clone() for name, x in self._state(member.row)}
        self._pad(member)
        self._note_padding(now.kind, state)
        member.kind, member.row = now.kind, -1
        return {sequence: state}

    def _return(self, member: Member, copies: bool) -> None:
        """Give the layers of a sequence their stores, as they would be without the table; copies: of all tensors."""
        pairs = []
        for layer in member.layers:
            store, row = slot_store(layer), (layer.index, member.row)
            memory = dict(store.memory)
            if copies:
                memory = {name: torch.empty_like(x) for name, x in store.memory.items()}
                pairs += [(memory[name], x) for name, x in store.memory.items()]
            free = None if store.free is None else self.lengths["free"][row].clone()[None, :, None]
            counts = None if store.counts is None else self.lengths["counts"][row].clone()[None]
            layer.store = store.with_memory(memory, free, counts)
        copy_each(pairs)
        unbind(member.layers)

    def update(self, sequence: CachedSequence) -> None:
        """Bring the lengths that the host has of a sequence's layers up to date."""
        member = self._members[sequence]
        steps, member.steps = member.steps, 0
        member.room, member.due = member.room - steps, member.due - steps
        for layer in member.layers if steps else ():
            if sequence.policy.decoding_evicts:
                layer.decided = sequence.seen
            store, grow = slot_store(layer), slots_to_grow(sequence, layer, member.used[layer.index])
            taken = min(steps, grow)
            layer.footprint += decoded(layer.count - layer.short, steps, max(0, grow - 1))
            layer.count += taken - (taken == grow > 0)
            member.used[layer.index] += taken
            row = layer.index, member.row
            free = self.lengths["free"][row][None, :, None] if taken == grow else None
            counts = None if store.counts is None else self.lengths["counts"][row][None]
            fills = free is not None and store.free is None
            if isinstance(store, RingLayer):
                store.follow(member.used[layer.index], sequence.seen - steps)
            else:
                store.grown(member.used[layer.index], taken, free, counts)
            if fills:
                sequence.note_bytes(layer.index)
        if steps and self.backend is not None and not self.backend.reads_at_once:
            self._settle(member)

    def _settle(self, member: Member) -> None:
        """End the steps of a sequence: its layers code what is due, in place."""
        state = {name: self.lengths[name][:, member.row] for name in STATE if name in self.lengths}
        for layer in member.layers:
            store = layer.store
            before = store.in_codes if isinstance(store, RingLayer) else None
            try:
                store.settle()
            except ValueError as error:  # numbers that are not finite
                member.sequence.fail(error)
            if isinstance(store, RingLayer) and store.in_codes != before:
                if state:
                    note_codes(store, state, layer.index, self._memory.positions_of(layer))
                member.sequence.note_bytes(layer.index)

    def _new_state(self, sequence: CachedSequence, layers: Sequence[Layer]) -> RowState:
        """The state of a sequence whose slots are in the flat memory, from its layers."""
        state = dict(zip(LENGTHS, self._segments(sequence, layers), strict=False))
        state["nan"] = state["starts"].new_zeros(len(layers), dtype=torch.bool)
        state["next"], state["advance"] = (state["starts"].new_tensor([x]) for x in ([sequence.seen], [1]))
        if isinstance(codes := layers[0].store, TokenCodeLayer) and codes.clipped is not None:
            state["clipped"] = torch.zeros_like(state["nan"], dtype=torch.int64)
        if not sequence.policy.decoding_evicts:
            return state if self.backend is None or self.backend.reads_at_once else state | ring_state(layers)
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
                first, heads = self._memory.start(layer), store.first.shape[1]
                slots = store.capacity // heads
                used, grow = [store.used] * heads, slots_to_grow(sequence, layer)
                begins = [first + head * slots for head in range(heads)]
                numbers.append([begins, used, used, [store.used + grow] * heads])
            yield from torch.tensor(numbers, device=stores[0].first.device).unbind(1)
            return
        segments = []
        for layer, store in zip(layers, stores, strict=True):
            starts, counts, free = store.segments()
            segments.append((starts + self._memory.start(layer), counts, free, counts + slots_to_grow(sequence, layer)))
        yield from map(torch.cat, zip(*segments, strict=True))

    # --- places ----------------------------------------------------------------------------------------------------
    def _state(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Everything that the device has about a row, by name: views [L or 1,...]."""
        for name, x in self.lengths.items():
            yield name, x[:, row]
        for group in self._groups:
            if group.has(row):
                for name, x in group.state.items():
                    yield name, x[:, row - group.rows.start]

    def _write(self, row: int, state: RowState) -> None:
        """Write the state of a row."""
        for name, x in self._state(row):
            x.copy_(state[name])

    def _note_padding(self, kind: Kind, state: RowState) -> None:
        """Keep the state of empty places of a kind, one of whose sequences has this state."""
        if self._pads:
            self._empty.setdefault(kind, _padding(state))

    def _pad(self, member: Member) -> None:
        """Make the place of a sequence an empty one."""
        if self._pads:
            self._write(member.row, self._empty[member.kind])

    def _bind(self, member: Member) -> None:
        """Give the layers of a sequence views of their windows and memories, which its group changes."""
        state = dict(self._state(member.row))
        bind(member.layers, state)
        for layer in member.layers:
            self._bind_layer(layer, state)

    @staticmethod
    def _bind_layer(layer: Layer, state: RowState) -> None:
        if WINDOW[0] in state:
            layer.recent.bind(*(state[name][layer.index, None] for name in WINDOW))
        layer.memory |= {name: state[name][layer.index, None] for name in layer.memory if name in state}

    def _arrange(self, states: dict[CachedSequence, RowState]) -> None:
        """Give every kind its places, and every sequence one of them. states: of sequences without a place."""
        waiting: dict[Kind, list[Member]] = {}
        for member in self._members.values():
            waiting.setdefault(member.kind, []).append(member)
            if member.row >= 0:
                states[member.sequence] = {name: x.clone() for name, x in self._state(member.row)}
        places = Counter({kind: bucket(len(some)) if self._pads else len(some) for kind, some in waiting.items()})
        as_before = places | Counter(self._kinds)  # the larger number of each
        if self._pads and as_before.total() <= 2 * len(self._members):
            places = as_before
        rules = list(dict.fromkeys(kind.rule for kind in places))
        self._kinds = sorted(places.elements(), key=lambda kind: (rules.index(kind.rule), -kind.slots))
        self._empty = {kind: self._empty[kind] for kind in places if self._pads}
        found = []
        for row, kind in enumerate(self._kinds):
            if waiting.get(kind):
                member = waiting[kind].pop(0)
                member.row = row
                found.append(states[member.sequence])
            else:
                found.append(self._empty[kind])
        self.lengths = {name: torch.stack([one[name] for one in found], 1) for name in LENGTHS if name in found[0]}
        self._new = torch.zeros_like(self.lengths["free"])  # [L,P,H] the slots of the new tokens
        self._gone = torch.zeros_like(self._new)  # and of those that they displace from a ring
        self._arrangements, self._longest, self._groups = self._arrangements + 1, 0, []
        for rows in groups_of(self._kinds):
            own = [name for name in found[rows.start] if name not in LENGTHS]
            state = {name: torch.stack([one[name] for one in found[rows]], 1) for name in own}
            self._groups.append(Group(self._kinds[rows], rows, self._memory, self.lengths, state))
        for member in self._members.values():
            self._bind(member)

    # --- a step ----------------------------------------------------------------------------------------------------
    def attend(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Append keys and values [P,H,1,D] of a layer and attend: [P,H_q,1,D]."""
        assert self.backend is not None
        if index == 0:
            self._take_slots()
            self.backend.begin(self._memory, self.lengths, self._stores())
        heads = self._new.shape[2]
        if keys.shape[1] != heads:  # each query head keeps its own tokens
            keys, values = (x.repeat_interleave(heads // keys.shape[1], dim=1) for x in (keys, values))
        tokens = NewTokens(keys, values, self._new[index])
        step = LayerStep(index, queries, tokens, self._gone[index], self.positions, self._longest, params)
        self._attended.append(step)
        return self.backend.attend(step, self._memory, self.lengths, self._codecs[index])

    def read(self, index: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of another layer's queries [P,H_q,1,D] to the tokens of a layer that has attended."""
        assert self.backend is not None
        step = replace(self._attended[index], queries=queries, params=params, appended=True)
        return self.backend.attend(step, self._memory, self.lengths, self._codecs[index])

    def end_call(self) -> None:
        """Evict after the last layer, and count the step."""
        if len(self._attended) < self._layers:  # no call, or one that ended early, as a failed recording does
            return
        assert self.backend is not None
        how = [step.params for step in self._attended]
        asked = [step.queries for step in self._attended]
        self._attended = []
        self.count(1)
        self._notify()
        newest = torch.stack(asked) if self._groups else asked[0]
        for group in self._groups:
            members = sorted((one for one in self._members.values() if group.has(one.row)), key=lambda one: one.row)
            try:
                group.evict(newest[:, group.rows], how, self.backend, [member.sequence for member in members])
            except Exception as error:
                for member in members:
                    member.sequence.fail(error)
        self.lengths["next"] += self.lengths["advance"]
        self.backend.end()
        for member in self._members.values() if self.backend.reads_at_once else ():
            self._settle(member)
        self._notify()
        if self.backend.reads_at_once and bool(self.lengths["nan"].any()):
            self._fail_broken()

    def _fail_broken(self) -> None:
        """Note the first layer with a NaN score of every sequence that has one."""
        for member in self._members.values():
            flags = self.lengths["nan"][:, member.row]
            if bool(flags.any()):
                member.sequence.nan_layer = int(flags.to(torch.uint8).argmax())
                flags.fill_(False)

    def _notify(self) -> None:
        """Tell those who watch a sequence that the contents of its layers changed."""
        for member in self._members.values():
            if member.sequence.on_change is not None:
                for layer in member.layers:
                    member.sequence.on_change(layer.index)

    def _stores(self) -> list[Sequence[Layer]]:
        """The layers of every row, for a backend that reads stores; none for padding."""
        found: list[Sequence[Layer]] = [()] * len(self._kinds)
        for member in self._members.values():
            found[member.row] = member.layers
        return found

    def _take_slots(self) -> None:
        """Take a slot for the next token of every row in all layers."""
        memory, lengths = self._memory, self.lengths
        self._attended.clear()
        grows = lengths["counts"] < lengths["limit"]
        torch.where(grows, lengths["counts"], lengths["free"], out=self._new)
        lengths["counts"] += grows
        if (codec := self._codecs[0]) is not None and CODED in lengths:
            take_places(lengths, codec.most_exact, memory.positions, memory.offsets, PADDING, (self._new, self._gone))
            return
        there = (lengths["starts"] + memory.offsets + self._new).flatten()
        memory.positions.view(-1).scatter_(0, there, lengths["next"].int().expand_as(self._new).flatten())
        for x in memory.statistics.values():
            x.flatten(0, 1).index_fill_(0, there, 0)
        if memory.weights is not None:
            memory.weights.zero_()


def _padding(state: RowState) -> RowState:
    """The state of an empty place where one with this state may be: one slot in use, overwritten by every token."""
    slots = {"starts": PADDING, "counts": 1, "limit": 1}
    return {name: torch.full_like(x, slots.get(name, 0)) for name, x in state.items()}

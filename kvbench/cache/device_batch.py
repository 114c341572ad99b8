"""Decoding steps of all dense sequences of a model at once, with few kernel launches: for a GPU.

Each layer has one flat memory (`kvbench.cache.arena`). Every KV head of every sequence has a segment of it; the start,
the number of slots in use and the next free slot of a segment are on the device. So one layer of a step is an append
and an attention for all sequences, of any policy, budget and length. After the last layer, sequences of one rule
(`Sequence.rule`) evict together (`kvbench.cache.device_eviction`). A sequence below its budget grows to one slot
more than its budget; then every new token replaces an evicted one. The host only counts steps, so that a step can be
recorded as a CUDA graph.

A step has one row for each place of a sequence. Sequences of one `Kind` differ in nothing that a recorded step has as a
constant, so a sequence that is admitted takes the place of a finished one of its kind, and the graph stays valid. For
that, a kind has 1, 2, 4, 8, 16, 24, 32 and so on places, and empty places are padding: they write to a slot of their
own, append one token after another there, and are not read. Places are arranged anew, and steps recorded anew, when a
kind needs more of them, and when most of them are empty. If budgets are shares of the prompt or measured on it, every
prompt is a kind of its own.

Shapes: L layers, P rows of a step, b of them in a part, H_q query heads, H KV heads, w queries of a window, D head dim.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.cache.arena import ENDLESS, PADDING, Arena, can_join, evicts, slot_store, slots_to_grow, step_formats
from kvbench.cache.cache import KVCache
from kvbench.cache.calls import Columns
from kvbench.cache.device_eviction import WINDOW, Kind, Part, kind_of, rows_of_parts
from kvbench.cache.device_groups import STATE, exact_state, follow, from_slots, ring_of, to_slots
from kvbench.cache.footprint import decoded
from kvbench.cache.hook import LayerCall
from kvbench.cache.layer import Layer
from kvbench.cache.sequence import Sequence
from kvbench.kernels.decode import decode_attention_flat
from kvbench.kernels.references import NewTokens
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_slots import group_step, take_places
from kvbench.policies.stores.token_codes import TokenCodeLayer, decode_step

LENGTHS = "starts", "counts", "free", "limit", "nan", "next", "advance", *STATE

State = dict[str, Tensor]
"""What the device has about the row of a sequence, [L or 1,...] by name: `LENGTHS`, windows and memory of mergers."""


@dataclass(eq=False)
class Member:
    """A sequence of the batch, and its row in a step.

    longest: bound of the length of its segments. room: steps until a store needs more slots. steps: since the lengths
    of its stores were last updated.
    """

    sequence: Sequence
    kind: Kind
    longest: int
    room: int
    row: int = -1
    steps: int = 0


def bucket(sequences: int) -> int:
    """The number of places for this many sequences of a kind: the next one of 1, 2, 4, 8, 16, 24, 32 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


class DeviceBatch(KVCache):
    """A cache of sequences that decode together, one token of each in every call of the model.

    Between `admit` and `free`, only the batch changes the layers of a sequence. lengths: data on the device about all
    rows: `starts`, `counts`, `free`, `limit` [L,P,H]: the start of a segment, its slots in use, and the slot of the
    next token when `limit` are in use; `nan` [L,P]: whether a score was NaN; `next` [1,P,1]: positions of the next
    tokens; `advance` [1,P,1]: 1, 0 for padding; and `STATE`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, Policy(name="full"))
        self.sequences.clear()
        self._supported = not (self._layout.owners or self._layout.latent)
        self._padded = not self._layout.states  # recurrent layers have no states of padding
        self._members: dict[Sequence, Member] = {}
        self._attended: list[tuple[Tensor, AttentionParams]] = []  # queries [P,H_q,1,D] of the layers so far
        self._arrangements = 0
        self._clear()

    def _clear(self) -> None:
        self._arena = Arena(len(self.attention_layers))
        self._formats: list[object] = []  # of the layers; one for all sequences
        self._codecs: list[Coding | None] = []  # of the layers; None: keys and values as they are
        self._longest = 0  # bound of the length of a segment
        self._kinds: list[Kind] = []  # of the rows
        self._empty: dict[Kind, State] = {}  # of padding
        self._parts: list[Part] = []
        self.lengths: State = {}

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when a recorded step is not valid any more."""
        return self._arrangements, self._longest, self._arena.version

    @property
    def rows(self) -> list[Sequence | None]:
        """The sequence of every row of a step; None for padding."""
        of_rows = {member.row: sequence for sequence, member in self._members.items()}
        return [of_rows.get(row) for row in range(len(self._kinds))]

    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [P,1]."""
        return self.lengths["next"][0]

    @property
    def nbytes(self) -> int:
        """Bytes that the sequences would hold without the batch."""
        self.update_lengths()
        return super().nbytes

    # --- sequences come and go -------------------------------------------------------------------------------------
    def admit(self, sequences: List[Sequence]) -> None:
        """Before every step: take over those of the sequences that can join, and lengthen stores without free slots."""
        states: dict[Sequence, State] = {}
        for member in self._members.values():
            if member.steps == member.room:
                states |= self._lengthen(member)
        joining = [sequence for sequence in sequences if can_join(sequence)] if self._supported else []
        if joining:
            self._formats = self._formats or step_formats(joining[0])
            joining = [one for one in joining if step_formats(one) == self._formats]
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
        spare = len(self._kinds) - len(self._members)
        if any(member.row < 0 for member in self._members.values()) or spare > len(self._members) * self._padded:
            self._arrange(states)
        self._longest = max([self._longest, *(member.longest for member in self._members.values())])

    def free(self, sequence: Sequence) -> None:
        """Return a sequence's layers, as they would be without the batch, in memory of their own."""
        member = self._members[sequence]
        self._update(member)
        state = {name: x.clone() for name, x in self._state(member.row)}
        self._return(member, sequence.layers)
        for layer in sequence.layers:
            self._arena.release(layer, last=len(self._members) == 1)
            if WINDOW[0] in state:
                queries, positions = (state[name][layer.index, None] for name in WINDOW)
                layer.recent.held = queries, positions
            layer.memory |= {name: state[name][layer.index, None] for name in layer.memory if name in state}
            sequence.note_bytes(layer.index)
        codes = sequence.layers[-1].store  # they had the newest token twice
        sequence.note(beside=codes.step_nbytes if isinstance(codes, TokenCodeLayer) else 0)
        sequence.nan_flags = dict(enumerate(state["nan"][:, None]))
        sequence.states = {name: x.clone() for name, x in sequence.states.items()}
        self._write(member.row, self._empty[member.kind])
        del self._members[sequence]
        self.sequences.remove(sequence)
        if not self.sequences:
            self._clear()

    def count(self, steps: int) -> None:
        """Count steps that the device took; negative to undo."""
        for member in self._members.values():
            member.steps += steps
            member.sequence.tick(steps)

    def update_lengths(self) -> None:
        """Bring the lengths that layers have on the host up to date, so that they can be read between two steps."""
        for member in self._members.values():
            self._update(member)

    def _enter(self, sequences: List[Sequence]) -> dict[Sequence, State]:
        """Move the layers of sequences into the arenas; returns the states of their rows."""
        for sequence in sequences:
            for layer in sequence.layers:
                if not to_slots(layer) and slots_to_grow(sequence, layer) > 0:
                    slot_store(layer).reserve()
        for index in range(len(self.attention_layers)):
            self._arena.hold(index, [sequence.layers[index] for sequence in sequences])
        states = {}
        self._codecs = [getattr(layer.store, "codec", None) for layer in sequences[0].layers]
        for sequence in sequences:
            states[sequence] = state = self._new_state(sequence)
            self._members[sequence] = member = _member(sequence)
            self.sequences.append(sequence)
            self._empty.setdefault(member.kind, _padding(state))
            if member.kind.policy.needs.newest_row:
                self._arena.collect_weights(sequence.layers[0].query_heads // state["starts"].shape[1])
        return states

    def _lengthen(self, member: Member) -> dict[Sequence, State]:
        """Give a sequence more slots where it has none; returns its state if it needs a place of another kind."""
        sequence, longer = member.sequence, list[int]()
        self._update(member)
        for layer in sequence.layers:
            if slots_to_grow(sequence, layer) > 0 and slot_store(layer).room == 0:
                longer.append(layer.index)
                self._return(member, [layer])
                self._arena.release(layer)
                if not to_slots(layer):
                    slot_store(layer).reserve()
                self._arena.hold(layer.index, [layer])
        new = self._new_state(sequence)
        self.lengths["starts"][:, member.row] = new["starts"]
        for name in STATE if STATE[0] in new else ():
            self.lengths[name][longer, member.row] = new[name][longer]
        now = _member(sequence)
        member.longest, member.room = now.longest, now.room
        if now.kind == member.kind:
            return {}
        state = {name: x.clone() for name, x in self._state(member.row)}
        self._write(member.row, self._empty[member.kind])
        self._empty.setdefault(now.kind, _padding(state))
        member.kind, member.row = now.kind, -1
        return {sequence: state}

    def _return(self, member: Member, layers: List[Layer]) -> None:
        """Give layers copies of their stores, as they would be without the batch."""
        pairs = []
        for layer in layers:
            if from_slots(member.sequence, layer):
                continue
            store, row = slot_store(layer), (layer.index, member.row)
            memory = {name: torch.empty_like(x) for name, x in store.memory.items()}
            pairs += [(memory[name], x) for name, x in store.memory.items()]
            free = None if store.free is None else self.lengths["free"][row].clone()[None, :, None]
            counts = None if store.counts is None else self.lengths["counts"][row].clone()[None]
            layer.store = store.with_memory(memory, free, counts)
        self._arena.copy(pairs)

    def _update(self, member: Member) -> None:
        """Update the lengths that the host has of a sequence."""
        sequence, steps, member.steps = member.sequence, member.steps, 0
        member.room -= steps
        if steps and STATE[0] in self.lengths:
            follow(sequence, steps, {name: self.lengths[name][:, member.row] for name in STATE})
        for layer in sequence.layers if steps else ():
            store, grow = slot_store(layer), slots_to_grow(sequence, layer)
            taken = min(steps, grow)
            layer.footprint += decoded(layer.count - layer.short, steps, max(0, grow - 1))
            store.use(store.used + taken, store.room - taken)
            layer.count += taken - (taken == grow > 0)
            if taken == grow:
                store.free = self.lengths["free"][layer.index, member.row, None, :, None]
            if store.counts is not None:
                store.counts = self.lengths["counts"][layer.index, member.row, None]

    def _new_state(self, sequence: Sequence) -> State:
        """The state of a sequence that is in the arenas, from its layers."""
        layers = sequence.layers
        state = dict(zip(LENGTHS, self._arena.segments(sequence), strict=False))
        state["nan"] = state["starts"].new_zeros(len(layers), dtype=torch.bool)
        state["next"], state["advance"] = (state["starts"].new_tensor([x]) for x in ([sequence.seen], [1]))
        if not evicts(sequence.policy):
            return state | exact_state(layers)
        windows = [layer.recent.held for layer in layers if layer.recent.held is not None]
        if windows:
            state |= {name: torch.cat([window[i] for window in windows]) for i, name in enumerate(WINDOW)}
        return state | {name: torch.cat([layer.memory[name] for layer in layers]) for name in layers[0].memory}

    # --- places ----------------------------------------------------------------------------------------------------
    def _state(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Everything that the device has about a row, by name: views [L or 1,...]."""
        for name, x in self.lengths.items():
            yield name, x[:, row]
        for part in self._parts:
            if part.rows.start <= row < part.rows.stop:
                for name, x in part.state.items():
                    yield name, x[:, row - part.rows.start]

    def _write(self, row: int, state: State) -> None:
        """Write the state of a row."""
        for name, x in self._state(row):
            x.copy_(state[name])

    def _arrange(self, states: dict[Sequence, State]) -> None:
        """Give every kind its places, and every sequence one of them. states: of sequences without a place."""
        waiting: dict[Kind, list[Member]] = {}
        for member in self._members.values():
            waiting.setdefault(member.kind, []).append(member)
            if member.row >= 0:
                states[member.sequence] = {name: x.clone() for name, x in self._state(member.row)}
        places = Counter({kind: bucket(len(some)) if self._padded else len(some) for kind, some in waiting.items()})
        as_before = places | Counter(self._kinds)  # the larger number of each
        if self._padded and as_before.total() <= 2 * len(self._members):
            places = as_before
        rules = list(dict.fromkeys(kind.rule for kind in places))
        self._kinds = sorted(places.elements(), key=lambda kind: (rules.index(kind.rule), -kind.slots))
        self._empty = {kind: self._empty[kind] for kind in places}
        self.sequences.clear()
        found = []
        for row, kind in enumerate(self._kinds):
            found.append(self._empty[kind])
            if waiting.get(kind):
                member = waiting[kind].pop(0)
                member.row, found[row] = row, states[member.sequence]
                self.sequences.append(member.sequence)
        self.lengths = {name: torch.stack([one[name] for one in found], 1) for name in LENGTHS if name in found[0]}
        self._new = torch.zeros_like(self.lengths["free"])  # [L,P,H] the slots of the new tokens
        self._gone = torch.zeros_like(self._new)  # and of those that they displace from a ring
        per_layer = self.lengths["starts"], self.lengths.get("coded", self.lengths["counts"]), self._new, self._gone
        self._of_layers = list(zip(*(x.unbind() for x in per_layer), strict=True))
        self._arrangements, self._longest, self._parts = self._arrangements + 1, 0, []
        for rows in rows_of_parts(self._kinds):
            own = [name for name in found[rows.start] if name not in LENGTHS]
            state = {name: torch.stack([one[name] for one in found[rows]], 1) for name in own}
            self._parts.append(Part(self._kinds[rows], rows, self._arena, self.lengths, state))

    # --- a step ----------------------------------------------------------------------------------------------------
    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        """Append the new keys and values [P,H,1,D] of a layer and attend: [P,H_q,1,D]; evict after the last layer."""
        index = self._places[call.index]
        if index == 0:
            self._take_slots()
        arena, (starts, counts, slots, gone) = self._arena, self._of_layers[index]
        self._attended.append((queries, params))
        tokens, codec = NewTokens(call.new_keys, call.new_values, slots), self._codecs[index]
        places, memory = (self.positions, arena.positions[index]), arena.memory[index]
        if codec is not None and codec.grouped:
            ring = ring_of(self.lengths, index)
            out = group_step(
                codec, queries, tokens, gone, memory, ring, places, (starts, counts), self._longest, params
            )
        elif codec is not None:
            out = decode_step(codec, queries, tokens, memory, places, (starts, counts), self._longest, params)
        else:
            stored = memory["keys"], memory["values"], *places, starts, counts, self._longest
            sums = None if arena.weights is None else arena.weights[index]
            out = decode_attention_flat(queries, *stored, *params.for_kernels, sums=sums, new_tokens=tokens).out
        if index == len(self.attention_layers) - 1:
            asked, how = zip(*self._attended, strict=True)
            newest = torch.stack(asked) if self._parts else queries
            for part in self._parts:
                part.evict(newest[:, part.rows], how)
            self.lengths["next"] += self.lengths["advance"]
            self.count(1)
        return out

    def _take_slots(self) -> None:
        """Take a slot for the next token of every row in all layers."""
        arena, lengths = self._arena, self.lengths
        self._attended.clear()
        grows = lengths["counts"] < lengths["limit"]
        torch.where(grows, lengths["counts"], lengths["free"], out=self._new)
        lengths["counts"] += grows
        if (codec := self._codecs[0]) is not None and codec.grouped:
            take_places(lengths, codec.most_exact, arena.positions, arena.offsets, PADDING, (self._new, self._gone))
            return
        there = (lengths["starts"] + arena.offsets + self._new).flatten()
        arena.positions.view(-1).scatter_(0, there, lengths["next"].int().expand_as(self._new).flatten())
        for x in arena.statistics.values():
            x.flatten(0, 1).index_fill_(0, there, 0)
        if arena.weights is not None:
            arena.weights.zero_()


def _member(sequence: Sequence) -> Member:
    """A sequence as its stores are now."""
    room, longest = ENDLESS, 0
    for layer in sequence.layers:
        store, grow = slot_store(layer), slots_to_grow(sequence, layer)
        longest = max(longest, store.used + min(grow, store.room))
        if grow > store.room:
            room = min(room, store.room)
    longest = 1 << (longest - 1).bit_length()  # so that it seldom changes
    kind = kind_of(sequence, longest) if evicts(sequence.policy) else Kind()
    return Member(sequence, kind, kind.slots or longest, room)


def _padding(state: State) -> State:
    """The state of an empty place where one with this state may be: one slot in use, overwritten by every token."""
    slots = {"starts": PADDING, "counts": 1, "limit": 1}
    return {name: torch.full_like(x, slots.get(name, 0)) for name, x in state.items()}

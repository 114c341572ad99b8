"""The table of the sequences that decode together: one token of each in every call, with few operations per layer.

The table knows its sequences, their rows, and how many slots they have; their layers are in a set for each shape
(`kvbench.cache.layer_set`). A sequence below its budget grows to one slot more than its budget; then every new token
replaces an evicted one. The host only counts steps, so that a step can be recorded as a CUDA graph.

A step has one row for each place of a sequence. Sequences of one `Kind` differ in nothing that a recorded step has as a
constant. If steps are recorded (`pads`), a sequence that is admitted takes the place of a finished one of its kind, so
that the graph stays valid: a kind then has 1, 2, 4, 8, 16, 24, 32 and so on places, and empty places are padding: they
write to a slot of their own, append one token after another there, and are not read. Places are arranged anew, and
steps recorded anew, when a kind needs more of them, and when most of them are empty. If budgets are shares of the
prompt or measured on it, every prompt is a kind of its own.

Shapes: P rows of a step, H_q query heads, H KV heads, D head dim.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.group import Kind
from kvbench.cache.joining import format_of, sets_of, slots_to_grow
from kvbench.cache.layer_set import LayerSet, RowState, padding
from kvbench.cache.member import Member, member_of
from kvbench.cache.memory import slot_store
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.token_codes import TokenCodeLayer

TIGHT = 0.9  # share of flat memory above which sequences that leave together keep it


def bucket(sequences: int) -> int:
    """The number of places for this many sequences of a kind: the next one of 1, 2, 4, 8, 16, 24, 32 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


class Table:
    """Sequences of one format of stores that decode together.

    Between `admit` and `free`, only the table changes the layers of a sequence. pads: rows may be padding. format: of
    the layers; one for all sequences.
    """

    def __init__(self, pads: bool) -> None:
        self._pads = pads
        self._members: dict[CachedSequence, Member] = {}
        self._arrangements = 0
        self._clear()

    def _clear(self) -> None:
        self.format: object = None
        self._sets: list[LayerSet] = []
        self._longest = 0  # bound of the length of a segment
        self._kinds: list[Kind] = []  # of the rows
        self._empty: dict[Kind, list[RowState]] = {}  # of padding, in every set

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when a recorded step is not valid any more."""
        return self._arrangements, self._longest, *(some.memory.version for some in self._sets)

    @property
    def rows(self) -> list[CachedSequence | None]:
        """The sequence of every row of a step; None for padding."""
        of_rows = {member.row: sequence for sequence, member in self._members.items()}
        return [of_rows.get(row) for row in range(len(self._kinds))]

    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [P,1]."""
        return self._sets[0].positions

    # --- sequences come and go -------------------------------------------------------------------------------------
    def admit(self, joining: Sequence[CachedSequence]) -> None:
        """Before every step: take over sequences of the table's format, and lengthen stores without free slots."""
        states: dict[CachedSequence, list[RowState]] = {}
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
                for some, own in zip(self._sets, state, strict=True):
                    some.write(member.row, own)
                    some.bind(member)
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
        return self._sets[0].memory.used_share > TIGHT

    def free_all(self) -> None:
        """Return the layers of all sequences, which stay where they are: no sequence takes their slots any more."""
        for sequence in list(self._members):
            self.free(sequence, copies=False)

    def _free(self, member: Member, copies: bool) -> None:
        sequence, last = member.sequence, len(self._members) == 1
        self.update(sequence)
        sequence.nan_flags = {}
        for some in self._sets:
            sequence.nan_flags |= some.free(member, copies, last)
        for layer in member.layers:
            sequence.note_bytes(layer.index)
        codes = member.layers[-1].store  # they had the newest token twice
        sequence.note(beside=codes.step_nbytes if isinstance(codes, TokenCodeLayer) else 0)
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

    def _enter(self, sequences: Sequence[CachedSequence]) -> dict[CachedSequence, list[RowState]]:
        """Move the layers of sequences into the flat memory; returns the states of their rows."""
        for sequence in sequences:
            for layer in sequence.layers:
                if sequence.policy.decoding_evicts:
                    slot_store(layer).store_positions()
                if slots_to_grow(sequence, layer) > 0:
                    slot_store(layer).reserve()
                    sequence.note_bytes(layer.index)
        layers = sequences[0].layers
        self._sets = self._sets or [LayerSet(some, layers) for some in sets_of(layers)]
        for some in self._sets:
            some.hold(sequences)
        states = {}
        for sequence in sequences:
            states[sequence] = state = [some.new_state(sequence) for some in self._sets]
            self._members[sequence] = member = member_of(sequence, sequence.layers)
            sequence.table = self
            self._note_padding(member.kind, state)
        return states

    def _lengthen(self, member: Member) -> dict[CachedSequence, list[RowState]]:
        """Give a sequence more slots where it has none; returns its state if it needs a place of another kind."""
        sequence = member.sequence
        self.update(sequence)
        for some in self._sets:
            some.lengthen(member)
        now = member_of(sequence, member.layers)
        member.longest, member.room, member.due, member.used = now.longest, now.room, now.due, now.used
        if now.kind == member.kind:
            return {}
        state = self._state(member)
        self._pad(member)
        self._note_padding(now.kind, state)
        member.kind, member.row = now.kind, -1
        return {sequence: state}

    def update(self, sequence: CachedSequence) -> None:
        """Bring the lengths that the host has of a sequence's layers up to date."""
        member = self._members[sequence]
        steps, member.steps = member.steps, 0
        member.room, member.due = member.room - steps, member.due - steps
        for some in self._sets if steps else ():
            some.follow(member, steps)
            if not some.backend.reads_at_once:
                some.settle(member)

    # --- places ----------------------------------------------------------------------------------------------------
    def _state(self, member: Member) -> list[RowState]:
        """A copy of everything that the device has about a sequence."""
        return [{name: x.clone() for name, x in some.state(member.row)} for some in self._sets]

    def _note_padding(self, kind: Kind, state: Sequence[RowState]) -> None:
        """Keep the state of empty places of a kind, one of whose sequences has this state."""
        if self._pads and kind not in self._empty:
            self._empty[kind] = [padding(own) for own in state]

    def _pad(self, member: Member) -> None:
        """Make the place of a sequence an empty one."""
        if self._pads:
            for some, empty in zip(self._sets, self._empty[member.kind], strict=True):
                some.write(member.row, empty)

    def _arrange(self, states: dict[CachedSequence, list[RowState]]) -> None:
        """Give every kind its places, and every sequence one of them. states: of sequences without a place."""
        waiting: dict[Kind, list[Member]] = {}
        for member in self._members.values():
            waiting.setdefault(member.kind, []).append(member)
            if member.row >= 0:
                states[member.sequence] = self._state(member)
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
        self._arrangements, self._longest = self._arrangements + 1, 0
        for some, own in zip(self._sets, zip(*found, strict=True), strict=True):
            some.arrange(self._kinds, own)
            for member in self._members.values():
                some.bind(member)

    # --- a step ----------------------------------------------------------------------------------------------------
    def attend(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Append keys and values [P,H,1,D] of a layer and attend: [P,H_q,1,D]."""
        if index == 0:
            rows = [() if sequence is None else self._members[sequence].layers for sequence in self.rows]
            for some in self._sets:
                some.begin(rows)
        return self._set_of(index).attend(index, queries, keys, values, self._longest, params)

    def read(self, index: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of another layer's queries [P,H_q,1,D] to the tokens of a layer that has attended."""
        return self._set_of(index).read(index, queries, params)

    def _set_of(self, index: int) -> LayerSet:
        return next(some for some in self._sets if index in some.layers)

    def end_call(self) -> None:
        """Evict after the last layer, and count the step."""
        if not self._sets or not all(some.is_done for some in self._sets):  # a failed recording ends early
            return
        self.count(1)
        self._notify()
        members = list(self._members.values())
        for some in self._sets:
            some.evict(members)
            for member in members if some.backend.reads_at_once else ():
                some.settle(member)
        self._notify()
        for some in self._sets:
            if some.backend.reads_at_once and some.is_broken:
                for member in members:
                    some.note_broken(member)

    def _notify(self) -> None:
        """Tell those who watch a sequence that the contents of its layers changed."""
        for member in self._members.values():
            if member.sequence.on_change is not None:
                for layer in member.layers:
                    member.sequence.on_change(layer.index)

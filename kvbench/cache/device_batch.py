"""Decoding steps of all dense sequences of a model at once, with few kernel launches: for a GPU.

Each layer has one flat memory (`kvbench.cache.arena`). Every KV head of every sequence has a segment of it; the start,
the number of slots in use and the next free slot of a segment are on the device. So one layer of a step is an append
and an attention for all sequences, of any policy, budget and length. After the last layer, sequences of one rule
(`PolicyGroup.rule`) evict together, several layers as rows of one batch. A sequence below its budget grows to one slot
more than its budget; then every new token replaces an evicted one. The host only counts steps, so that a step can be
recorded as a CUDA graph.

A step has one row for each place of a sequence. Sequences of one `Kind` differ in nothing that a recorded step has as a
constant, so a sequence that is admitted takes the place of a finished one of its kind, and the graph stays valid. For
that, a kind has 1, 2, 4, 8, 16, 24, 32 and so on places, and empty places are padding: they write to a slot of their
own, append one token after another there, and are not read. Places are arranged anew, and steps recorded anew, when a
kind needs more of them, and when most of them are empty. If budgets are shares of the prompt or measured on it, every
prompt is a kind of its own.

Shapes: L layers, P places, b of them in a part, k layers evicted at once, n = k * b rows, H_q query heads, H KV heads,
T slots of the longest segment, w queries of a window, D head dim.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.arena import EMPTY, ENDLESS, PADDING, Arena, can_join, evicts, slot_store, slots_to_grow
from kvbench.cache.attention import QKV
from kvbench.cache.cache import KVCache
from kvbench.cache.eviction import observe, select_one
from kvbench.cache.group import PolicyGroup, keeps_window
from kvbench.cache.state import LayerState
from kvbench.kernels.decode import decode_attention_flat
from kvbench.kernels.prompt import one_for_all
from kvbench.kernels.references import NewTokens
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, Observation, QueryWindow, SequenceInfo, SlotInfo
from kvbench.policies.policy import Policy
from kvbench.policies.stacked import LazyObservation

WORKSPACE = 2**29  # bytes of keys, values and attention rows of an eviction in memory at once
WINDOW = "window queries", "window positions"  # names of the tensors of a window, beside those of mergers
LENGTHS = "starts", "counts", "free", "limit", "nan", "next", "advance"


@dataclass(frozen=True)
class Kind:
    """What a recorded step has as constants of a sequence.

    rule: of evictions; None if decoding does not evict. budgets: of each layer. slots: bound of a segment's length.
    prompt: its length, if the policy uses it, else -1. see_own: whether each query of the window sees its own token.
    """

    rule: object = None
    budgets: tuple[int, ...] = ()
    slots: int = 0
    prompt: int = -1
    see_own: bool = False
    policy: Policy = field(compare=False, default_factory=Policy)


@dataclass(eq=False)
class Member:
    """A sequence of the batch, and its row in a step.

    longest: bound of the length of its segments. room: steps until a store needs more slots. steps: since the lengths
    of its stores were last updated.
    """

    group: PolicyGroup
    kind: Kind
    longest: int
    room: int
    row: int = -1
    steps: int = 0


@dataclass
class Part:
    """Rows of one rule. state: windows, and memory of mergers, [L,b,...] by name. shared: data for scorers of a step.

    plan: layers that are evicted at once, and parameters of their attention.
    """

    policy: Policy
    kinds: list[Kind]
    rows: slice
    state: dict[str, Tensor]
    shared: dict[str, Tensor] = field(default_factory=dict)
    plan: list[tuple[tuple[int, ...], AttentionParams]] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Bound of the length of a segment."""
        return max(kind.slots for kind in self.kinds)


def bucket(sequences: int) -> int:
    """The number of places for this many sequences of a kind: the next one of 1, 2, 4, 8, 16, 24, 32 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


class DeviceBatch(KVCache):
    """A cache of sequences that decode together, one token of each in every call of the model.

    Between `admit` and `free`, only the batch changes the layers of a sequence. lengths: what the device knows of every
    row, by name: `starts`, `counts`, `free`, `limit` [L,P,H]: the start of a segment, the slots that attention reads,
    and the one that the next token takes when `limit` slots are in use; `nan` [L,P]: whether a score was NaN; `next`
    [1,P,1]: positions of the next tokens; `advance` [1,P,1]: 1, 0 for padding. version: changes when a recorded step is
    not valid any more.
    """

    def __init__(self, config: PreTrainedConfig, padded: bool = False) -> None:
        """padded: places are padded so that steps can be recorded, if the model has no recurrent layers."""
        super().__init__(config, Policy(name="full"))
        self.groups.clear()
        self.supported = not (self._layout.owners or self._layout.latent)
        self.lengths: dict[str, Tensor] = {}
        self.version = 0
        self._padded = padded and not self._layout.states
        self._arena: Arena | None = None
        self._arena_version = 0
        self._members: dict[PolicyGroup, Member] = {}
        self._kinds: list[Kind] = []  # of the rows
        self._empty: dict[Kind, dict[str, Tensor]] = {}  # the state of padding
        self._parts: list[Part] = []
        self._longest = 0
        self._attended: list[tuple[Tensor, AttentionParams]] = []  # queries [P,H_q,1,D] of the layers so far

    @property
    def rows(self) -> list[PolicyGroup | None]:
        """The sequence of every row of a step; None for padding."""
        rows: list[PolicyGroup | None] = [None] * len(self._kinds)
        for member in self._members.values():
            rows[member.row] = member.group
        return rows

    @property
    def positions(self) -> Tensor:
        """Positions of the next tokens [P,1]."""
        return self.lengths["next"][0]

    # --- sequences come and go -------------------------------------------------------------------------------------
    def admit(self, groups: Sequence[PolicyGroup]) -> None:
        """Before every step: take over those of the sequences that can join, and lengthen stores without free slots."""
        states: dict[PolicyGroup, dict[str, Tensor]] = {}
        for member in self._members.values():
            if member.steps == member.room:
                states |= self._lengthen(member)
        joining = [group for group in groups if can_join(group)] if self.supported else []
        if joining:
            states |= self._enter(joining)
        taken = {member.row for member in self._members.values()}
        for group, state in states.items():
            member = self._members[group]
            places = (row for row, kind in enumerate(self._kinds) if kind == member.kind and row not in taken)
            member.row = next(places, -1)
            if member.row >= 0:
                taken.add(member.row)
                self._write(member.row, state)
        spare = len(self._kinds) - len(self._members)
        longest = max((member.longest for member in self._members.values()), default=0)
        if any(member.row < 0 for member in self._members.values()) or spare > len(self._members) * self._padded:
            self._arrange(states)
            self._bind(longest)
        elif self._arena is not None and (longest > self._longest or self._arena.version != self._arena_version):
            self._bind(max(longest, self._longest))

    def free(self, group: PolicyGroup) -> None:
        """Return a sequence's layers, as they would be without the batch, in memory of their own."""
        member, arena = self._members[group], self._arena
        assert arena is not None
        self._update(member)
        state = {name: x.clone() for name, x in self._state(member.row)}
        for layer in group.layers:
            self._return(member, layer, copied=True)
            arena.release(layer, last=len(self._members) == 1)
            if WINDOW[0] in state:
                queries, positions = (state[name][layer.index, None] for name in WINDOW)
                layer.recent.held = queries, positions
            layer.memory = {name: state[name][layer.index, None] for name in layer.memory}
            group.note_bytes(layer.index)
        group.nan_flags = dict(enumerate(state["nan"][:, None]))
        group.states = {name: x.clone() for name, x in group.states.items()}
        del self._members[group]
        self.groups.remove(group)
        if self.groups:
            self._write(member.row, self._empty[member.kind])
        else:
            self._arena, self._kinds, self._parts, self._empty, self.lengths = None, [], [], {}, {}

    def count(self) -> None:
        """Count a step, as the device did."""
        for member in self._members.values():
            member.steps += 1
            member.group.progress.tick(1)

    @property
    def nbytes(self) -> int:
        """Bytes that the sequences would hold without the batch."""
        for member in self._members.values():
            self._update(member)
        return super().nbytes

    def _enter(self, groups: Sequence[PolicyGroup]) -> dict[PolicyGroup, dict[str, Tensor]]:
        """Move the layers of sequences into the arenas; returns the states of their rows."""
        for group in groups:
            for layer in group.layers:
                if slots_to_grow(group, layer) > 0:
                    slot_store(layer).reserve()
        if self._arena is None:
            self._arena = Arena(groups[0])
        for index in range(len(groups[0].layers)):
            self._arena.hold(index, [group.layers[index] for group in groups])
        states = {}
        for group in groups:
            states[group] = state = self._lengths_of(group) | _other_state(group)
            self._members[group] = member = _member(group)
            self.groups.append(group)
            self._empty.setdefault(member.kind, _padding(state))
            if member.kind.policy.needs.newest_row:
                self._arena.collect_weights(group.layers[0].query_heads // state["starts"].shape[1])
        return states

    def _lengthen(self, member: Member) -> dict[PolicyGroup, dict[str, Tensor]]:
        """Give a sequence more slots where it has none; returns its state if it needs a place of another kind."""
        group, arena = member.group, self._arena
        assert arena is not None
        self._update(member)
        for layer in group.layers:
            if slots_to_grow(group, layer) > 0 and slot_store(layer).room == 0:
                self._return(member, layer, copied=False)
                arena.release(layer)
                slot_store(layer).reserve()
                arena.hold(layer.index, [layer])
        self.lengths["starts"][:, member.row] = self._lengths_of(group)["starts"]
        now = _member(group)
        member.longest, member.room = now.longest, now.room
        if now.kind == member.kind:
            return {}
        state = {name: x.clone() for name, x in self._state(member.row)}
        self._write(member.row, self._empty[member.kind])
        self._empty.setdefault(now.kind, _padding(state))
        member.kind, member.row = now.kind, -1
        return {group: state}

    def _return(self, member: Member, layer: LayerState, copied: bool) -> None:
        """Give a layer its store as it would be without the batch, `copied` out of the arena or a view of it."""
        store, index = slot_store(layer), layer.index
        free, counts = (self.lengths[name][index, member.row].clone() for name in ("free", "counts"))
        layer.store = store.with_memory(
            {name: x.clone() if copied else x for name, x in store.memory.items()},
            None if store.free is None else free[None, :, None],
            None if store.counts is None else counts[None],
        )

    def _update(self, member: Member) -> None:
        """Update the lengths that the host has of a sequence."""
        group, steps, member.steps = member.group, member.steps, 0
        member.room -= steps
        for layer in group.layers if steps else ():
            store, grow = slot_store(layer), slots_to_grow(group, layer)
            taken = min(steps, grow)
            store.use(store.used + taken, store.room - taken)
            layer.counts = [layer.counts[0] + taken - (taken == grow > 0)]
            if taken == grow:
                store.free = self.lengths["free"][layer.index, member.row, None, :, None]

    def _lengths_of(self, group: PolicyGroup) -> dict[str, Tensor]:
        """The lengths [L,H] of a sequence that is in the arenas, from its stores."""
        assert self._arena is not None
        found = []
        for layer in group.layers:
            starts, held, free, _ = slot_store(layer).segments()
            counts = held + (slot_store(layer).free is not None)
            found.append((starts + self._arena.start(layer), counts, free, counts + slots_to_grow(group, layer)))
        return dict(zip(("starts", "counts", "free", "limit"), map(torch.cat, zip(*found, strict=True)), strict=True))

    # --- places ----------------------------------------------------------------------------------------------------
    def _state(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Everything that the device has about a row, by name: views [L or 1,...]."""
        for name, x in self.lengths.items():
            yield name, x[:, row]
        for part in self._parts:
            if part.rows.start <= row < part.rows.stop:
                for name, x in part.state.items():
                    yield name, x[:, row - part.rows.start]

    def _write(self, row: int, state: Mapping[str, Tensor]) -> None:
        """Write the state of a row."""
        for name, x in self._state(row):
            x.copy_(state[name])

    def _arrange(self, states: dict[PolicyGroup, dict[str, Tensor]]) -> None:
        """Give every kind its places, and every sequence one of them. states: of sequences without a place."""
        waiting: dict[Kind, list[Member]] = {}
        for member in self._members.values():
            waiting.setdefault(member.kind, []).append(member)
            if member.row >= 0:
                states[member.group] = {name: x.clone() for name, x in self._state(member.row)}
        places = Counter({kind: bucket(len(some)) if self._padded else len(some) for kind, some in waiting.items()})
        as_before = places | Counter(self._kinds)  # the larger number of each
        if self._padded and as_before.total() <= 2 * len(self._members):
            places = as_before
        rules = list(dict.fromkeys(kind.rule for kind in places))
        self._kinds = sorted(places.elements(), key=lambda kind: rules.index(kind.rule))
        self._empty = {kind: self._empty[kind] for kind in places}
        self.groups.clear()
        found = []
        for row, kind in enumerate(self._kinds):
            found.append(self._empty[kind])
            if waiting.get(kind):
                member = waiting[kind].pop(0)
                member.row, found[row] = row, states[member.group]
                self.groups.append(member.group)
        self.lengths = {name: torch.stack([one[name] for one in found], 1) for name in LENGTHS}
        self._parts = []
        for rule, rows in groupby(range(len(found)), lambda row: self._kinds[row].rule):
            here = list(rows)
            if rule is not None:
                own = [name for name in found[here[0]] if name not in LENGTHS]
                state = {name: torch.stack([found[row][name] for row in here], 1) for name in own}
                kinds = [self._kinds[row] for row in here]
                self._parts.append(Part(kinds[0].policy, kinds, slice(here[0], here[-1] + 1), state))

    def _bind(self, longest: int) -> None:
        """Prepare what steps use. longest: bound of the length of a segment."""
        arena, self._longest = self._arena, longest
        assert arena is not None
        layers, device = len(arena.keys), arena.positions.device
        self._arena_version = arena.version
        self._before = torch.arange(layers, device=device)[:, None, None] * arena.slots
        self._columns = torch.arange(max((part.longest for part in self._parts), default=0), device=device)
        self._new = torch.zeros_like(self.lengths["free"])  # [L,P,H] the slots of the new tokens
        self._of_layers = list(
            zip(*(x.unbind() for x in (self.lengths["starts"], self.lengths["counts"], self._new)), strict=True)
        )
        for part in self._parts:
            part.plan.clear()
        self.version += 1

    # --- a step ----------------------------------------------------------------------------------------------------
    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """Append the new keys and values [P,H,1,D] of a layer and attend: [P,H_q,1,D]; evict after the last layer."""
        assert mask is None, "decoded tokens are not padded"
        assert self._arena is not None
        if index == 0:
            self._begin_step()
        arena, (starts, counts, slots) = self._arena, self._of_layers[index]
        self._attended.append((new.queries, params))
        out = decode_attention_flat(
            new.queries,
            arena.keys[index],
            arena.values[index],
            self.positions,
            arena.positions[index],
            starts,
            counts,
            self._longest,
            params.scaling,
            params.softcap,
            params.sliding_window,
            one_for_all(params.sinks),
            sums=None if arena.weights is None else arena.weights[index],
            new_tokens=NewTokens(new.keys, new.values, slots),
        ).out
        if index == len(arena.keys) - 1:
            self._end_step()
        return out

    def _begin_step(self) -> None:
        """Take a slot for the next token of every row in all layers."""
        arena, lengths = self._arena, self.lengths
        assert arena is not None
        grows = lengths["counts"] < lengths["limit"]
        torch.where(grows, lengths["counts"], lengths["free"], out=self._new)
        lengths["counts"] += grows
        there = (lengths["starts"] + self._before + self._new).flatten()
        arena.positions.view(-1).scatter_(0, there, lengths["next"].int().expand_as(self._new).flatten())
        for x in arena.statistics.values():
            x.flatten(0, 1).index_fill_(0, there, 0)
        if arena.weights is not None:
            arena.weights.zero_()
        for part in self._parts:
            part.shared.clear()
        self._attended.clear()

    def _end_step(self) -> None:
        """Evict after the last layer."""
        if self._parts:
            queries, params = zip(*self._attended, strict=True)
            newest = torch.stack(queries)
            for part in self._parts:
                part.plan = part.plan or list(self._plan(part, newest, params))
                for layers, how in part.plan:
                    self._evict(part, layers, how, _of(newest[:, part.rows], layers))
        self.lengths["next"] += self.lengths["advance"]

    def _plan(
        self, part: Part, queries: Tensor, params: Sequence[AttentionParams]
    ) -> Iterator[tuple[tuple[int, ...], AttentionParams]]:
        """Layers with equal attention, as many at once as fit the workspace, and the parameters of their attention."""
        policy, rows, heads = part.policy, len(part.kinds), self._new.shape[2]
        equal: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alike = (*how[:3], how.sinks is None) if policy.layers_alike else index
            equal.setdefault(alike, []).append(index)
        window, reads = policy.needs.queries_decoding, policy.value is not None or policy.merger.merges
        numbers = queries.shape[2] * max(1, window) + (2 * heads * queries.shape[-1] if window or reads else 0)
        at_once = max(1, WORKSPACE // (4 * rows * part.longest * numbers))
        for some in equal.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                if how.sinks is not None:
                    sinks = torch.cat([x for index in chosen if (x := params[index].sinks) is not None])
                    how = how._replace(sinks=sinks.repeat_interleave(rows, dim=0))
                yield chosen, how

    def _evict(self, part: Part, layers: tuple[int, ...], how: AttentionParams, queries: Tensor) -> None:
        """Evict in some layers of a part; queries [k,b,H_q,1,D]."""
        arena, policy, (count, rows) = self._arena, part.policy, queries.shape[:2]
        assert arena is not None
        starts, counts, free, limit = (
            _of(self.lengths[name][:, part.rows], layers) for name in ("starts", "counts", "free", "limit")
        )
        before, columns = _of(self._before, layers)[..., None], self._columns[: part.longest]
        inside = torch.where(columns < counts[..., None], starts[..., None] + columns, EMPTY)  # [k,b,H,T]
        where = (inside + before).flatten(0, 1)
        seen = self._observe(part, layers, how, queries, where, inside)
        width = queries.shape[2] // starts.shape[2] if policy.needs.query_heads else 1
        stored = {name: arena.statistics[name, width].flatten(0, 1) for name in policy.needs.statistics}
        state = {name: x[where] for name, x in stored.items()}
        if state:
            observe(policy, seen, state)
            for name, x in state.items():
                stored[name][where] = x
        full = counts == limit  # the others take one more slot instead
        memory = {name: _of(x, layers).flatten(0, 1) for name, x in part.state.items() if name not in WINDOW}
        vectors = [Vectors([seen.keys]), Vectors([seen.values])] if policy.merger.merges else ()
        ranking, nan = policy.rank(seen, state), self.lengths["nan"][:, part.rows]
        _put(nan, layers, _of(nan, layers) | ranking.broken().view(count, rows))
        index = layers[0] if len(layers) == 1 else -1
        evicting = full.flatten(0, 1)[:, :1, None]
        chosen, merged = select_one(policy, ranking, seen, state, vectors, memory, evicting, index)
        for name, x in memory.items():
            _put(part.state[name], layers, x.view(count, rows, *x.shape[1:]))
        if merged is not None:
            into = inside.flatten(0, 1).gather(-1, merged[0]).view(count, -1)
            for memories, new in zip((arena.keys, arena.values), merged[1:], strict=True):
                for layer, slots, x in zip(layers, into, new.reshape(count, -1, new.shape[-1]), strict=True):
                    memories[layer].index_copy_(0, slots, x.to(memories[layer].dtype))
        chosen = torch.minimum(chosen.view(starts.shape), counts - 1)  # of padding, it may be any slot
        evicted, positions = (starts + before[..., 0] + chosen).flatten(), arena.positions.view(-1)
        positions[evicted] = positions[evicted].masked_fill(full.flatten(), -1)
        _put(self.lengths["free"][:, part.rows], layers, torch.where(full, chosen, free))

    def _observe(
        self,
        part: Part,
        layers: tuple[int, ...],
        how: AttentionParams,
        queries: Tensor,
        where: Tensor,
        inside: Tensor,
    ) -> Observation:
        """Some layers of a part as n rows; their slots in all layers, where [n,H,T], and in each, inside [k,b,H,T]."""
        arena, count = self._arena, len(layers)
        assert arena is not None
        places = self.positions[part.rows].repeat(count, 1)

        def rows(memory: list[Tensor]) -> Tensor:
            return torch.cat([memory[layer][own] for layer, own in zip(layers, inside, strict=True)])

        seen = LazyObservation(
            {"keys": lambda: rows(arena.keys), "values": lambda: rows(arena.values)},
            layer=layers[0],
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=arena.positions.view(-1)[where],
            seen=places[:, 0] + 1,
            phase="decode",
            params=how,
            window=self._window(part, layers, queries, places) if WINDOW[0] in part.state else None,
            slots=SlotInfo(ascending=False, whole=False),
            sequences=SequenceInfo(
                aligned=True,
                opens=(True,) * len(places),
                budgets=tuple(kind.budgets[index] for index in layers for kind in part.kinds),
                prompts=tuple(kind.prompt for kind in part.kinds if kind.prompt >= 0) * count,
            ),
            shared=part.shared,
        )
        if part.policy.needs.newest_row:
            assert arena.weights is not None
            seen.store_weights(arena.weights.flatten(0, 1)[where].transpose(-1, -2)[:, :, :, None])
        return seen

    def _window(self, part: Part, layers: tuple[int, ...], queries: Tensor, places: Tensor) -> QueryWindow:
        """Append queries [k,b,H_q,1,D] at places [n,1] to the window of a part and return it for n rows."""
        found = []
        for name, new, dim in zip(WINDOW, (queries, places.view(*queries.shape[:2], 1)), (3, 2), strict=True):
            x = part.state[name]
            own = torch.cat([_of(x, layers).narrow(dim, 1, x.shape[dim] - 1), new], dim)
            _put(x, layers, own)
            found.append(own.flatten(0, 1))
        return QueryWindow(found[0], found[1], see_own=all(kind.see_own for kind in part.kinds))


def _member(group: PolicyGroup) -> Member:
    """A sequence as its stores are now."""
    policy, room, longest = group.policy, ENDLESS, 0
    for layer in group.layers:
        store, grow = slot_store(layer), slots_to_grow(group, layer)
        longest = max(longest, store.used + min(grow, store.room))
        if grow > store.room:
            room = min(room, store.room)
    longest = 1 << (longest - 1).bit_length()  # so that it seldom changes
    if not evicts(policy):
        return Member(group, Kind(), longest, room)
    budgets = tuple(group.budgets.of(layer.index, [True])[0] for layer in group.layers)
    longest = longest if policy.allocator.per_head else min(longest, max(budgets) + 1)
    memory = tuple((name, x.shape) for name, x in group.layers[0].memory.items())
    uses_prompt = policy.schedule.protect == "prompt" or policy.pre_pass is not None
    see_own = all(layer.recent.real for layer in group.layers) and keeps_window(policy, budgets)
    kind = Kind(
        rule=(group.rule, policy.schedule.protect, memory),
        budgets=budgets,
        slots=longest,
        prompt=group.progress.prompt[0] if uses_prompt else -1,
        see_own=see_own,
        policy=policy,
    )
    return Member(group, kind, longest, room)


def _other_state(group: PolicyGroup) -> dict[str, Tensor]:
    """The state [L or 1,...] of a sequence's row, except for the lengths of its segments."""
    layers, device = group.layers, slot_store(group.layers[0]).memory["keys"].device
    state = {
        "nan": torch.zeros(len(layers), dtype=torch.bool, device=device),
        "next": torch.tensor([group.progress.seen], device=device),
        "advance": torch.ones(1, 1, dtype=torch.long, device=device),
    }
    if not evicts(group.policy):
        return state
    windows = [layer.recent.held for layer in layers if layer.recent.held is not None]
    if windows:
        state |= {name: torch.cat([window[i] for window in windows]) for i, name in enumerate(WINDOW)}
    return state | {name: torch.cat([layer.memory[name] for layer in layers]) for name in layers[0].memory}


def _padding(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an empty place where one with this state may be: one slot in use, overwritten by every token."""
    slots = {"starts": PADDING, "counts": 1, "limit": 1}
    return {name: torch.full_like(x, slots.get(name, 0)) for name, x in state.items()}


def _of(x: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Some layers of a tensor [L,...]: [k,...], a view if they follow one another."""
    first, last = layers[0], layers[-1]
    return x[first : last + 1] if last - first + 1 == len(layers) else x[on_device(layers, x.device)]


def _put(x: Tensor, layers: tuple[int, ...], new: Tensor) -> None:
    """Write some layers [k,...] into a tensor [L,...]."""
    first, last = layers[0], layers[-1]
    if last - first + 1 == len(layers):
        x[first : last + 1].copy_(new)
    else:
        x.index_copy_(0, on_device(layers, x.device), new)

"""Decoding steps of all dense sequences of a cache at once, with few kernel launches: for a GPU.

Each layer has one flat memory, an arena. Every KV head of every sequence has a segment of it; the start, the number of
slots in use and the next free slot of a segment are on the device. So one layer of a step is an append and an attention
for all sequences, of any policy, budget and length. After the last layer, sequences of one rule (`PolicyGroup.rule`)
evict together, several layers as rows of one batch. A sequence below its budget grows to one slot more than its budget;
then every new token replaces an evicted one. The host only counts steps, so that a step can be recorded as a CUDA
graph. A finished sequence may stay as padding, while its cache is copied.

Shapes: L layers, S sequences, b of them in a part, k layers evicted at once, n = k * b rows, H_q query heads, H KV
heads, G = H_q / H, N slots of a layer, T slots of the longest segment, w queries of a window, D head dim.
"""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from itertools import groupby

import torch
from torch import Tensor

from kvbench.cache.arena import ENDLESS, Part, Segment, evicts, lay_out, slot_store, slots_to_grow
from kvbench.cache.attention import QKV
from kvbench.cache.eviction import observe, select_one
from kvbench.cache.group import PolicyGroup, keeps_window
from kvbench.kernels.decode import decode_attention_flat
from kvbench.kernels.prompt import one_for_all
from kvbench.kernels.references import NewTokens
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, Observation, QueryWindow, SequenceInfo, SlotInfo
from kvbench.policies.stacked import LazyObservation

WORKSPACE = 2**29  # bytes of keys, values and attention rows of an eviction in memory at once


class DeviceBatch:
    """The decoding sequences of some groups. Until `close`, only the batch changes their layers.

    replayable: a step needs nothing but its tokens.
    """

    def __init__(self, groups: Sequence[PolicyGroup]) -> None:
        """Move the layers of the groups into an arena; see `can_join`."""
        self.groups = list(groups)
        self.replayable = not any(group.policy.rates for group in groups)
        self._grow = [[slots_to_grow(group, layer, slot_store(layer)) for layer in group.layers] for group in groups]
        self.slots = slots = lay_out(groups, self._grow)
        self._segments: list[list[Segment]] = []
        for place, group in enumerate(self.groups):
            free = slots.free[:, place : place + 1, :, None]
            layers = zip(group.layers, self._grow[place], free, strict=True)
            some = [Segment(slot_store(layer), layer, grow, one, evicts(group.policy)) for layer, grow, one in layers]
            self._segments.append(some)
        self._steps = 0
        self._stopped: dict[int, int] = {}  # finished sequences, and the number of steps before
        every = [segment for some in self._segments for segment in some]
        self._longest = max(segment.used + min(segment.grow, segment.room) for segment in every)
        self._least_room = min((segment.room for segment in every if segment.grow > segment.room), default=ENDLESS)
        self._last_growth = max(min(segment.grow, segment.room) for segment in every)
        self._advance = torch.ones_like(slots.places)  # tokens that a sequence appends in a step
        self._next = slots.free.clone()  # [L,S,H] the slots of the new tokens
        sizes = [len(keys) for keys in slots.keys]
        self._ends = (slots.before.flatten() + torch.tensor(sizes, device=slots.before.device) - 1)[:, None, None, None]
        self._columns = torch.arange(self._longest, device=slots.positions.device)
        self._positions = slots.positions.split(sizes)
        self._weights = None if slots.weights is None else slots.weights.split(sizes)
        self._of_layers = list(zip(*(x.unbind() for x in (slots.starts, slots.counts, self._next)), strict=True))
        self._attended: list[tuple[Tensor, AttentionParams]] = []  # queries [S,H_q,1,D] of the layers so far
        self._parts = list(self._split())
        for some in self._segments:
            for segment in some:
                segment.store._packed, segment.store._marked = False, True
        self.count(0)

    def _split(self) -> Iterator[Part]:
        """Neighbours that evict by one rule, in layers of one kind."""

        def kind(group: PolicyGroup) -> object:
            memory = tuple((name, x.shape) for layer in group.layers for name, x in layer.memory.items())
            widths = tuple((name, x.shape[-1]) for name, x in slot_store(group.layers[0]).memory.items())
            alone = group if group.policy.needs.kept else None  # layers exchange data about one sequence
            return alone, group.rule, evicts(group.policy), memory, widths

        end = 0
        for _, some in groupby(self.groups, key=kind):
            groups = list(some)
            begin, end = end, end + len(groups)
            layers = [[group.layers[index] for group in groups] for index in range(len(groups[0].layers))]
            window = None
            if evicts(groups[0].policy) and layers[0][0].recent.held is not None:
                held = [[layer.recent.held for layer in row if layer.recent.held is not None] for row in layers]
                window = [torch.stack([torch.cat([pair[i] for pair in row]) for row in held]) for i in (0, 1)]
            names = layers[0][0].memory
            memory = {
                name: torch.stack([torch.cat([layer.memory[name] for layer in row]) for row in layers])
                for name in names
            }
            yield Part(groups, slice(begin, end), window, memory)

    # --- a step ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Take a slot for the next token of every sequence in all layers."""
        slots = self.slots
        grows = slots.counts < slots.limit
        torch.where(grows, slots.counts, slots.free, out=self._next)
        slots.counts += grows
        there = (slots.starts + slots.before + self._next).flatten()
        slots.positions.scatter_(0, there, slots.places.int().expand_as(self._next).flatten())
        for x in slots.statistics.values():
            x.index_fill_(0, there, 0)
        if slots.weights is not None:
            slots.weights.zero_()
        for group in self.groups:
            group.begin_step()
        self._attended.clear()

    def attend(self, layer: int, new: QKV, params: AttentionParams) -> Tensor:
        """Append the new keys and values [S,H,1,D] of a layer and attend: [S,H_q,1,D]."""
        slots, (starts, counts, following) = self.slots, self._of_layers[layer]
        self._attended.append((new.queries, params))
        return decode_attention_flat(
            new.queries,
            slots.keys[layer],
            slots.values[layer],
            slots.places,
            self._positions[layer],
            starts,
            counts,
            self._longest,
            params.scaling,
            params.softcap,
            params.sliding_window,
            one_for_all(params.sinks),
            sums=None if self._weights is None else self._weights[layer],
            new_tokens=NewTokens(new.keys, new.values, following),
        ).out

    def end(self) -> None:
        """Evict after the last layer."""
        evicting = [part for part in self._parts if evicts(part.policy)]
        if evicting:
            queries, params = zip(*self._attended, strict=True)
            newest = torch.stack(queries)
            for part in evicting:
                if part.plan is None:
                    part.plan = list(self._plan(part, newest, params))
                for layers, how in part.plan:
                    self._evict(part, layers, how, _of(newest[:, part.here], layers))
        self.slots.places += self._advance

    @property
    def room(self) -> int:
        """Steps until a store must grow; 0 if every sequence is finished."""
        return 0 if len(self._stopped) == len(self.groups) else self._least_room - self._steps

    def count(self, steps: int) -> None:
        """Count steps, as the device did; negative to undo."""
        before, self._steps = self._steps, self._steps + steps
        grew = min(before, self._steps) <= self._last_growth
        for place, (group, segments) in enumerate(zip(self.groups, self._segments, strict=True)):
            if place not in self._stopped:
                group.progress.tick(steps)
                for segment in segments if grew else ():
                    segment.update(self._steps)

    def halt(self, place: int) -> None:
        """Keep a finished sequence as padding: it repeats its last step, and its slots are not used any more."""
        self.slots.limit[:, place] = self.slots.counts[:, place]
        self._advance[place] = 0
        self._stopped[place] = self._steps

    def copied(self, group: PolicyGroup) -> PolicyGroup:
        """A copy of a group, as it would be without the batch."""
        found = copy(group)
        memo = {id(group.policy): group.policy}
        found.progress, found.budgets = deepcopy((group.progress, group.budgets), memo)
        found.states = {name: x.clone() for name, x in group.states.items()}
        found.shared, found.not_numbers = {}, dict(group.not_numbers)
        self._leave(group, found, copies=True)
        return found

    def close(self) -> None:
        """Return the layers to their groups, as they would be without the batch."""
        for group in self.groups:
            self._leave(group, group, copies=False)
            for layer in group.layers:
                group.note_bytes(layer.index)

    def _leave(self, group: PolicyGroup, target: PolicyGroup, copies: bool) -> None:
        """Set the layers of `target` to those of a group, with copied lengths, and copied slots if `copies`."""
        place = self.groups.index(group)
        part = next(part for part in self._parts if place < part.here.stop)
        row, layers = slice(place - part.here.start, place - part.here.start + 1), []
        for before in group.layers:
            layer, store, index = copy(before), slot_store(before), before.index
            memory = {name: x.clone() if copies else x for name, x in store.memory.items()}
            free = None if store.free is None else store.free.clone()
            own = store.with_memory(memory, free)
            own.counts = None if store.counts is None else self.slots.counts[index, place : place + 1].clone()
            own._packed, own._ascending = free is None and store.starts is None, store._ascending and free is None
            layer.store, layer.counts, layer.recent = own, list(before.counts), copy(before.recent)
            if part.window is not None:
                queries, positions = (x[index, row].clone() for x in part.window)
                layer.recent.held = queries, positions
            layer.memory = {name: x[index, row].clone() for name, x in part.memory.items()}
            layers.append(layer)
        target.layers = layers
        target.nan_flags = dict(enumerate(self.slots.nan[:, place : place + 1].clone()))

    # --- eviction --------------------------------------------------------------------------------------------------
    def _plan(
        self, part: Part, queries: Tensor, params: Sequence[AttentionParams]
    ) -> Iterator[tuple[tuple[int, ...], AttentionParams]]:
        """Layers with equal attention, as many at once as fit the workspace, and the parameters of their attention."""
        equal: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            equal.setdefault((*how[:3], how.sinks is None), []).append(index)
        policy, rows, heads = part.policy, len(part.groups), self.slots.starts.shape[2]
        window, reads = policy.needs.queries_decoding, policy.value is not None or policy.merger.merges
        numbers = queries.shape[2] * max(1, window) + (2 * heads * queries.shape[-1] if window or reads else 0)
        at_once = max(1, WORKSPACE // (4 * rows * self._longest * numbers)) if policy.layers_alike else 1
        for some in equal.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                if how.sinks is not None:
                    sinks = torch.cat([x for index in chosen if (x := params[index].sinks) is not None])
                    how = how._replace(sinks=sinks.repeat_interleave(rows, dim=0))
                yield chosen, how

    def _evict(self, part: Part, layers: tuple[int, ...], how: AttentionParams, queries: Tensor) -> None:
        """Evict in some layers of a part; queries [k,b,H_q,1,D]."""
        slots, policy, (count, rows) = self.slots, part.policy, queries.shape[:2]
        starts, counts, free, limit = (
            _of(x[:, part.here], layers) for x in (slots.starts, slots.counts, slots.free, slots.limit)
        )
        before = _of(slots.before, layers)
        there = self._columns < counts[..., None]  # [k,b,H,T]
        begin = starts + before
        where = torch.where(there, begin[..., None] + self._columns, _of(self._ends, layers))
        seen = self._observe(part, layers, how, queries, where, where - before[..., None])
        widths = {name: x.shape[-1] for name, x in slot_store(part.groups[0].layers[0]).memory.items()}
        names = {name: slots.statistics[name, widths[name]] for name in policy.needs.statistics}
        where = where.flatten(0, 1)
        state = {name: x[where] for name, x in names.items()}
        if state:
            observe(policy, seen, state)
            for name, x in state.items():
                names[name][where] = x
        growing = any(self._grow[place][index] for place in range(part.here.start, part.here.stop) for index in layers)
        evicting = (counts == limit).flatten(0, 1)[:, :1, None] if growing else None
        memory = {name: _of(x, layers).flatten(0, 1) for name, x in part.memory.items()}
        vectors = [Vectors([seen.keys]), Vectors([seen.values])] if policy.merger.merges else ()
        ranking = policy.rank(seen, state)
        _put(slots.nan[:, part.here], layers, _of(slots.nan[:, part.here], layers) | ranking.broken().view(count, rows))
        index = layers[0] if len(layers) == 1 else -1
        chosen, merged = select_one(policy, ranking, seen, state, vectors, memory, evicting, index)
        for name, x in memory.items():
            own = x.view(count, rows, *x.shape[1:])
            part.memory.setdefault(name, own.new_zeros(len(slots.keys), *own.shape[1:]))
            _put(part.memory[name], layers, own)
        if merged is not None:
            into = (starts.flatten(0, 1)[..., None] + merged[0]).view(count, -1)
            for stored, new in zip((slots.keys, slots.values), merged[1:], strict=True):
                for layer, slot, x in zip(layers, into, new.reshape(count, -1, new.shape[-1]), strict=True):
                    stored[layer].index_copy_(0, slot, x.to(stored[layer].dtype))
        chosen = chosen.view(starts.shape)
        evicted = (begin + chosen).flatten()
        if evicting is None:
            slots.positions.index_fill_(0, evicted, -1)
        else:
            full = counts == limit
            chosen = torch.where(full, chosen, free)
            slots.positions[evicted] = slots.positions[evicted].masked_fill(full.flatten(), -1)
        _put(slots.free[:, part.here], layers, chosen)

    def _observe(
        self,
        part: Part,
        layers: tuple[int, ...],
        how: AttentionParams,
        queries: Tensor,
        where: Tensor,
        inside: Tensor,
    ) -> Observation:
        """Some layers of a part as n rows; where, inside [k,b,H,T]: their slots in all layers, and in each layer."""
        slots, policy, groups, count = self.slots, part.policy, part.groups, len(layers)
        budgets = tuple(group.budgets.of(index, [True])[0] for index in layers for group in groups)
        places = slots.places[part.here].repeat(count, 1)
        shared = groups[0].shared
        if policy.rates:
            shared = {"ratings": torch.cat([group.shared["ratings"] for group in groups]).repeat(count, 1)}

        def rows(memory: list[Tensor]) -> Tensor:
            return torch.cat([memory[layer][own] for layer, own in zip(layers, inside, strict=True)])

        seen = LazyObservation(
            {"keys": lambda: rows(slots.keys), "values": lambda: rows(slots.values)},
            layer=layers[0],
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=slots.positions[where.flatten(0, 1)],
            seen=places[:, 0] + 1,
            phase="decode",
            params=how,
            window=self._window(part, layers, queries, places, budgets),
            slots=SlotInfo(ascending=False, whole=False),
            sequences=SequenceInfo(
                aligned=True,
                opens=(True,) * len(places),
                budgets=budgets,
                prompts=tuple(group.progress.prompt[0] for group in groups) * count,
            ),
            shared=shared,
        )
        if policy.needs.newest_row:
            assert slots.weights is not None
            seen.store_weights(slots.weights[where.flatten(0, 1)].transpose(-1, -2)[:, :, :, None])
        return seen

    def _window(
        self, part: Part, layers: tuple[int, ...], queries: Tensor, places: Tensor, budgets: Sequence[int]
    ) -> QueryWindow | None:
        """Append queries [k,b,H_q,1,D] at places [n,1] to the window of a part and return it for n rows."""
        if part.window is None:
            return None
        found = []
        for x, new, dim in zip(part.window, (queries, places.view(*queries.shape[:2], 1)), (3, 2), strict=True):
            own = torch.cat([_of(x, layers).narrow(dim, 1, x.shape[dim] - 1), new], dim)
            _put(x, layers, own)
            found.append(own.flatten(0, 1))
        real = all(group.layers[0].recent.real for group in part.groups)
        window, positions = found
        return QueryWindow(window, positions, see_own=real and keeps_window(part.policy, budgets))


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

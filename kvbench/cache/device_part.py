"""The sequences of one policy in a `DeviceBatch`, and how they evict: some or all of their layers as rows of one batch.

Shapes: L layers, b sequences, H_q query heads, H KV heads, G = H_q / H, T slots of the longest segment, w queries of a
window, k layers evicted at once, n = k * b rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.eviction import layers_alike, observe, one_each
from kvbench.cache.group import PolicyGroup
from kvbench.cache.state import LayerState, RecentQueries, keeps_window
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.store_list import StoreList, laid_out

WORKSPACE = 2**29  # bytes of keys, values and attention rows that stand side by side at once
ENDLESS = 1 << 30  # slots: a sequence that grows evicts nothing
HELD = ("keys", "values", "positions")


def evicts(policy: Policy) -> bool:
    return policy.evicts and policy.schedule.decode == "evict"


def units_of(store: LayerStore) -> list[SlotStore]:
    """The slot stores of a layer; none where it is stored otherwise, or slots have a bias."""
    if store.bias is not None:
        return []
    if isinstance(store, StoreList):
        return [held for _, held in store.by_length] if store.shape is not None else []
    return [store] if type(store) is SlotStore else []


def to_grow(group: PolicyGroup, layer: LayerState, units: Sequence[SlotStore]) -> list[int]:
    """Slots that each sequence takes until it has one more than its budget."""
    if group.policy.allocator.per_head:
        return [0 if unit.free is not None else 1 for unit in units for _ in range(_size(unit))]
    budgets = group.budgets.of(layer.index, [True] * group.size)
    used = [unit.used for unit in units for _ in range(_size(unit))]
    return [budget + 1 - n for budget, n in zip(budgets, used, strict=True)]


def _size(unit: SlotStore) -> int:
    """Its sequences."""
    return len(unit.memory["positions"] if unit.starts is None else unit.starts)


@dataclass
class Arena:
    """Slots of all layers. The last slot of a layer is always empty: it is read where shorter segments are filled up.

    keys, values: [N,D] of each layer. positions: of all layers one after another, -1 = empty; drawn: attention [...,G]
    of the newest queries, alike, where a policy reads it. starts, counts, free, limit [L,B,H]: where a segment begins
    in its layer, how many slots attention looks at, which of them the next token takes once `limit` are in use. before
    [L,1,1]: slots of the layers before. places [B,1]: where the next tokens stand.
    """

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    drawn: Tensor | None
    starts: Tensor
    counts: Tensor
    free: Tensor
    limit: Tensor
    before: Tensor
    places: Tensor


class DevicePart:
    """One policy's sequences, `here` among those of a batch.

    units: what each layer holds, views of the arena. evicts: each sequence at its budget evicts a token for every new
    one. grow: tokens that each layer takes before that. statistics: the policy's, [M+1,...] for M slots of all layers.
    going: sequences that did not end.
    """

    def __init__(self, group: PolicyGroup, here: slice) -> None:
        self.group, self.here, self.going = group, here, group.size
        self.evicts = evicts(group.policy)
        self.reads_newest = self.evicts and group.policy.needs.newest_row
        units = [units_of(layer.store) for layer in group.layers]
        slots = sum(unit.slots for some in units for unit in some)
        stored = units[0][0].memory.items()
        self.statistics = {n: x.new_zeros(slots + 1, x.shape[-1]) for n, x in stored if n not in HELD}
        self.units: list[list[SlotStore]] = []
        self.grow = [
            to_grow(group, layer, some)[0] if self.evicts else ENDLESS
            for layer, some in zip(group.layers, units, strict=True)
        ]
        self._filled = 0  # slots of the layers so far
        self._begins: list[Tensor] = []
        self._plan: list[tuple[tuple[int, ...], AttentionParams]] | None = None
        windows = [layer.recent.held for layer in group.layers] if self.evicts else [None]
        self._window = None if windows[0] is None else [torch.stack(x) for x in zip(*windows, strict=True)]
        memories = [layer.memory for layer in group.layers]
        self._memory = {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}

    @property
    def most(self) -> int:
        """Slots that attention may come to look at in the longest segment."""
        return max(
            unit.used + min(n, unit.room) for some, n in zip(self.units, self.grow, strict=True) for unit in some
        )

    @property
    def room(self) -> int:
        """Steps until a segment is full."""
        short = (unit.room for some, n in zip(self.units, self.grow, strict=True) for unit in some if n > unit.room)
        return min(short, default=ENDLESS)

    def move(
        self, layer: int, units: Sequence[SlotStore], flat: dict[str, Tensor], first: int
    ) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Copy a layer's units into its memory `flat` from slot `first` on: starts, counts, free slots and limits."""
        moved, begins, found = [], [], []
        limits = [unit.used + self.grow[layer] for unit in units]
        for unit, limit in zip(units, limits, strict=True):
            memory = {name: x[first : first + unit.slots] for name, x in flat.items()}
            memory |= {n: x[self._filled : self._filled + unit.slots] for n, x in self.statistics.items()}
            own, one = laid_out(unit, memory), int(unit.free is not None)
            starts, held, free, _ = own.segments()
            most = torch.full_like(held, limit) if unit.starts is None else held + one + self.grow[layer]
            found.append((starts + first, held + one, free, most))
            begins.append(starts + self._filled)
            moved.append(own)
            self._filled, first = self._filled + unit.slots, first + unit.slots
        self._begins.append(torch.cat(begins))
        self.units.append(moved)
        self.group.layers[layer].hold(moved[0] if len(moved) == 1 else StoreList(moved))
        return found

    def share(self, arena: Arena, last: Tensor) -> None:
        """Let the units read what changes from the arena. last [L]: the empty slot of every layer, among all slots."""
        self._begin = torch.stack(self._begins)
        self._last = last[:, None, None, None]
        self._steps = torch.arange(self.most, device=last.device)
        self._free: list[list[Tensor]] = []
        for layer, units in enumerate(self.units):
            ends = accumulate(map(_size, units), initial=self.here.start)
            rows = [slice(first, last) for first, last in pairwise(ends)]
            self._free.append([arena.free[layer, own, :, None] for own in rows])
            for unit, free, own in zip(units, self._free[layer], rows, strict=True):
                unit.free = None if unit.free is None else free
                unit.counts = None if unit.counts is None else arena.counts[layer, own]
                unit._packed = False

    def count(self, steps: int) -> None:
        """So many steps are over."""
        self.group.progress.tick(steps)
        if not self.going or not any(self.grow):
            return
        for layer, left in enumerate(self.grow):
            new = min(steps, left)
            if new == 0:
                continue
            self.grow[layer] = left - new if self.evicts else ENDLESS
            filled = self.evicts and left == new
            for unit, free in zip(self.units[layer], self._free[layer], strict=True):
                unit.use(unit.used + new, unit.room - new)
                unit.free = free if filled else None
            counts = self.group.layers[layer].counts
            counts[:] = [n + new - filled for n in counts]

    # --- eviction --------------------------------------------------------------------------------------------------
    def begin(self, slots: Tensor) -> None:
        """Statistics of the slots [L,B,H] that new tokens take start at 0."""
        if self.statistics:
            there = (self._begin + slots[:, self.here]).flatten()
            for x in self.statistics.values():
                x.index_fill_(0, there, 0)
        self.group.begin_step()

    def evict(self, slots: Arena, queries: Tensor, params: Sequence[AttentionParams]) -> None:
        """Evict where a layer holds a token more than its budget; queries [L,B,H_q,1,D] and parameters of attention."""
        if self._plan is None:
            self._plan = list(self._batches(queries, params))
        for layers, how in self._plan:
            self._evict(slots, layers, how, of(queries[:, self.here], layers))

    def _batches(
        self, queries: Tensor, params: Sequence[AttentionParams]
    ) -> Iterator[tuple[tuple[int, ...], AttentionParams]]:
        """Layers whose attention is alike, as many at once as the workspace holds, and the attention's parameters."""
        alike: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alike.setdefault((how.scaling, how.softcap, how.sliding_window, how.sinks is None), []).append(index)
        policy, rows, heads = self.group.policy, self.group.size, self._begin.shape[2]
        window, reads = policy.needs.queries_decoding, policy.value is not None or policy.merger.merges
        numbers = queries.shape[2] * max(1, window) + (2 * heads * queries.shape[-1] if window or reads else 0)
        at_once = max(1, WORKSPACE // (4 * rows * len(self._steps) * numbers)) if layers_alike(policy) else 1
        for some in alike.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                if how.sinks is not None:
                    own = torch.cat([x for index in chosen if (x := params[index].sinks) is not None])
                    how = how._replace(sinks=own.repeat_interleave(rows, dim=0))
                yield chosen, how

    def _evict(self, slots: Arena, layers: tuple[int, ...], how: AttentionParams, queries: Tensor) -> None:
        policy, (count, rows) = self.group.policy, queries.shape[:2]
        starts, counts, free, limit = (
            of(x[:, self.here], layers) for x in (slots.starts, slots.counts, slots.free, slots.limit)
        )
        there = self._steps < counts[..., None]  # [k,b,H,T]
        begin, last = starts + of(slots.before, layers), of(self._last, layers)
        where = torch.where(there, begin[..., None] + self._steps, last)
        noted = torch.where(there, of(self._begin, layers)[..., None] + self._steps, self._filled).flatten(0, 1)
        inside = where - of(slots.before, layers)[..., None]
        seen = self._seen(slots, layers, how, queries, where.flatten(0, 1), inside)
        state = {name: x[noted] for name, x in self.statistics.items()}
        if state:
            observe(policy, seen, state)
            for name, x in state.items():
                self.statistics[name][noted] = x
        going = None if not any(self.grow[index] for index in layers) else (counts == limit).flatten(0, 1)[:, :1, None]
        memory = {name: of(x, layers).flatten(0, 1) for name, x in self._memory.items()}
        vectors = [Vectors([seen.keys]), Vectors([seen.values])] if policy.merger.merges else ()
        index = layers[0] if len(layers) == 1 else -1
        ranking = policy.rank(seen, state)
        victims, merged = one_each(policy, ranking, seen, state, vectors, memory, going, index)
        self._remember(layers, memory, rows)
        if merged is not None:
            into = (starts.flatten(0, 1)[..., None] + merged[0]).view(count, -1)
            for stored, new in zip((slots.keys, slots.values), merged[1:], strict=True):
                for layer, slot, x in zip(layers, into, new.reshape(count, -1, new.shape[-1]), strict=True):
                    stored[layer].index_copy_(0, slot, x.to(stored[layer].dtype))
        gone = victims.view(starts.shape)
        evicted = (begin + gone).flatten()
        if going is None:
            slots.positions.index_fill_(0, evicted, -1)
        else:
            full = counts == limit
            gone = torch.where(full, gone, free)
            slots.positions[evicted] = slots.positions[evicted].masked_fill(full.flatten(), -1)
        put(slots.free[:, self.here], layers, gone)

    def _seen(
        self,
        slots: Arena,
        layers: tuple[int, ...],
        how: AttentionParams,
        queries: Tensor,
        where: Tensor,
        inside: Tensor,
    ) -> Observation:
        """What the policy sees of some layers as n rows; where [n,H,T] among the slots of all, inside [k,b,H,T]."""
        group, policy, (count, rows) = self.group, self.group.policy, queries.shape[:2]
        budgets = tuple(b for index in layers for b in group.budgets.of(index, [True] * rows))
        places = slots.places[self.here].repeat(count, 1)
        recent = self._newest(layers, queries, places)
        shared = group.shared
        if policy.rates:
            shared = {name: x.repeat(count, *[1] * (x.dim() - 1)) for name, x in shared.items()}
        seen = _Rows(
            slots,
            layers,
            inside,
            layer=layers[0],
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=slots.positions[where],
            seen=places[:, 0] + 1,
            scaling=how.scaling,
            phase="decode",
            recent_queries=recent and recent[0],
            recent_positions=recent and recent[1],
            sighted=recent is not None and group.layers[0].recent.real and keeps_window(policy, budgets),
            softcap=how.softcap,
            sliding_window=how.sliding_window,
            sinks=how.sinks,
            ascending=False,
            aligned=True,
            whole=False,
            opens=(True,) * len(places),
            budgets=budgets,
            prompts=tuple(group.progress.prompt) * count,
            shared=shared,
        )
        if self.reads_newest:
            assert slots.drawn is not None
            seen.told(slots.drawn[where].transpose(-1, -2)[:, :, :, None])
        return seen

    def _newest(self, layers: tuple[int, ...], queries: Tensor, places: Tensor) -> tuple[Tensor, Tensor] | None:
        """The window [n,H_q,w,D] after queries [k,b,H_q,1,D] at places [n,1], and its positions [n,w]."""
        if self._window is None:
            return None
        found = []
        for x, new in zip(self._window, (queries, places.view(*queries.shape[:2], 1)), strict=True):
            dim = 3 if x is self._window[0] else 2
            own = torch.cat([of(x, layers).narrow(dim, 1, x.shape[dim] - 1), new], dim)
            put(x, layers, own)
            found.append(own.flatten(0, 1))
        return found[0], found[1]

    def _remember(self, layers: tuple[int, ...], memory: dict[str, Tensor], rows: int) -> None:
        for name, x in memory.items():
            own = x.view(len(layers), rows, *x.shape[1:])
            if name not in self._memory:
                self._memory[name] = own.new_zeros(len(self.units), *own.shape[1:])
            put(self._memory[name], layers, own)

    # --- the end ---------------------------------------------------------------------------------------------------
    def state(self, layer: int, rows: slice | None = None) -> LayerState:
        """A layer as it goes on without the batch, all of its sequences or a copy of some."""
        before, units = self.group.layers[layer], self.units[layer]
        if rows is not None:
            first = 0
            for unit in units:
                if rows.start < first + _size(unit):
                    break
                first += _size(unit)
            units = [unit.picked(slice(rows.start - first, rows.stop - first)) if _size(unit) > 1 else unit]
        own = []
        for unit in units:
            memory = unit.memory if rows is None else {name: x.clone() for name, x in unit.memory.items()}
            own.append(unit.with_memory(dict(memory), None if unit.free is None else unit.free.clone()))
            own[-1].counts = None if unit.counts is None else unit.counts.clone()
            own[-1]._packed, own[-1]._marked = unit.free is None and unit.starts is None, True
            own[-1]._ascending = unit._ascending and unit.free is None
        here = range(self.group.size)[rows or slice(None)]
        recent = RecentQueries.of_rows([(before.recent, row) for row in here])
        if self._window is not None:
            recent.hold(*(x[layer][rows or slice(None)].clone() for x in self._window))
        memory = {name: x[layer][rows or slice(None)].clone() for name, x in self._memory.items()}
        held = own[0] if len(own) == 1 else StoreList.decoding(own)
        return before.like(held, recent, memory, [before.counts[row] for row in here])


class _Rows(Observation):
    """What the policy sees of the rows; their keys and values are copied only for scores that read them."""

    def __init__(self, slots: Arena, layers: tuple[int, ...], inside: Tensor, **known: Any) -> None:  # noqa: ANN401
        self.__dict__.update(known, _slots=slots, _layers=layers, _inside=inside, _known={})

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("keys", "values"):
            raise AttributeError(f"an observation has no {name}")
        memory = getattr(self._slots, name)
        rows = [memory[layer][own] for layer, own in zip(self._layers, self._inside, strict=True)]
        found = self.__dict__[name] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return found


def of(x: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Those of some layers of a tensor [L,...]: [k,...], a view where they follow one another."""
    first, last = layers[0], layers[-1]
    return x[first : last + 1] if last - first + 1 == len(layers) else x[on_device(layers, x.device)]


def put(x: Tensor, layers: tuple[int, ...], new: Tensor) -> None:
    """Write those of some layers, [k,...], into a tensor [L,...]."""
    first, last = layers[0], layers[-1]
    if last - first + 1 == len(layers):
        x[first : last + 1].copy_(new)
    else:
        x.index_copy_(0, on_device(layers, x.device), new)

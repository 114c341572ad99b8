"""The sequences of one policy in a `DeviceBatch`, and how they evict: some or all of their layers as rows of one batch.

Shapes: L layers, b sequences, H_q query heads, H KV heads, G = H_q / H, T slots of the longest head, w queries of a
window, k layers evicted at once, n = k * b rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.cache.device_slots import DeviceSlots, Unit
from kvbench.cache.evict import evict
from kvbench.cache.group import PolicyGroup
from kvbench.cache.layer_rows import LayerRows
from kvbench.cache.pending import Pending, layers_alike
from kvbench.cache.recent_queries import RecentQueries
from kvbench.cache.state import LayerState, keeps_window
from kvbench.cache.step import ALL, LayerStep
from kvbench.cache.steps import decoded
from kvbench.policies.constants import on_device
from kvbench.policies.observation import AttentionParams, Observation, State
from kvbench.policies.stores.store import LayerStore, Segments

WORKSPACE = 2**29  # bytes of keys, values and attention rows that stand side by side at once
HELD = ("keys", "values", "positions")


class Layers(NamedTuple):
    """Layers that are evicted at once, and what their attention has in common."""

    chosen: tuple[int, ...]
    params: AttentionParams

    @property
    def _slice(self) -> slice | None:
        first, last = self.chosen[0], self.chosen[-1]
        return slice(first, last + 1) if last - first + 1 == len(self.chosen) else None

    def of(self, x: Tensor) -> Tensor:
        """Theirs of a tensor [L,...]: [k,...], a view where they follow one another."""
        where = self._slice
        return x[on_device(self.chosen, x.device)] if where is None else x[where]

    def put(self, x: Tensor, new: Tensor) -> None:
        """Write theirs, [k,...], into a tensor [L,...]."""
        where = self._slice
        if where is None:
            x.index_copy_(0, on_device(self.chosen, x.device), new)
        else:
            x[where].copy_(new)


class DeviceGroup:
    """One policy's sequences, `here` among those of a batch, `size` of them.

    evicts: each gives a token up for every new one; else they grow. statistics: the policy's, [M+1,...] for M slots of
    all layers. going: sequences that did not end. room: slots that each of them has for tokens to come.
    """

    def __init__(self, group: PolicyGroup, here: slice, units: Sequence[Sequence[Unit]]) -> None:
        policy = group.policy
        self.group, self.here, self.size = group, here, group.size
        self.going = group.size
        self.evicts = policy.evicts and policy.schedule.decode == "evict"
        self.reads_newest = self.evicts and policy.needs.newest_row
        slots = sum(unit.slots for some in units for unit in some)
        stored = units[0][0].buffers.items()
        self.statistics = {n: x.new_zeros(slots + 1, x.shape[-1]) for n, x in stored if n not in HELD}
        self.room = 1 << 30 if self.evicts else min(unit.room for some in units for unit in some)
        self._filled = 0
        self._taken = 0
        self._segments: list[list[Segments]] = [[] for _ in units]
        self._statistics_begin: list[Tensor] = []
        self._plan: list[Layers] | None = None
        windows = [layer.recent.held for layer in group.layers] if self.evicts else [None]
        self._window = None if windows[0] is None else [torch.stack(x) for x in zip(*windows, strict=True)]
        memories = [layer.memory for layer in group.layers]
        self._memory = {name: torch.stack([memory[name] for memory in memories]) for name in memories[0]}

    @property
    def most(self) -> int:
        """Slots that attention may come to look at in the longest head."""
        return max(s.most for some in self._segments for s in some) + (1 if self.evicts else self.room)

    def move(self, layer: int, units: Sequence[Unit], flat: dict[str, Tensor], first: int) -> list[Unit]:
        """Bring a layer's units into its memory `flat` from slot `first` on, and their statistics into the policy's."""
        moved, begins = [], []
        for unit in units:
            own = {name: x[first : first + unit.slots] for name, x in flat.items()}
            statistics = {n: x[self._filled : self._filled + unit.slots] for n, x in self.statistics.items()}
            segments = unit.segments()
            moved.append(unit.moved(own | statistics))
            begins.append(segments.starts + self._filled)
            self._segments[layer].append(segments._replace(starts=segments.starts + first))
            self._filled, first = self._filled + unit.slots, first + unit.slots
        self._statistics_begin.append(torch.cat(begins))
        return moved

    def segments(self, layer: int) -> list[Segments]:
        """Where the KV heads of a layer lie in its memory, unit by unit."""
        return self._segments[layer]

    def lay_out(self, slots: DeviceSlots, last: Tensor) -> None:
        """All slots are known; last [L,1,1,1]: the empty one of every layer."""
        self._begins = torch.stack(self._statistics_begin)
        if self.evicts:
            steps = torch.arange(self.most, device=slots.starts.device)
            there = steps < slots.counts[:, self.here, :, None]
            begins = (slots.starts[:, self.here] + slots.before)[..., None]
            self.where = torch.where(there, begins + steps, last + slots.before[..., None])  # [L,b,H,T] of all layers
            self.where_statistics = torch.where(there, self._begins[..., None] + steps, self._filled)

    # --- a step ----------------------------------------------------------------------------------------------------
    def begin(self, slots: Tensor) -> None:
        """Statistics of the slots [L,B,H] that new tokens take start at 0."""
        if self.statistics:
            there = (self._begins + slots[:, self.here]).flatten()
            for x in self.statistics.values():
                x.index_fill_(0, there, 0)

    def count(self, steps: int) -> None:
        """So many steps are over."""
        if self.going:
            self._taken += steps
            self.room -= steps
        self.group.progress.tick(steps)

    def evict(self, slots: DeviceSlots, queries: Tensor, params: Sequence[AttentionParams]) -> None:
        """Every layer holds a token more than its budget; queries [L,B,H_q,1,D] and parameters are its attention's."""
        if self._plan is None:
            self._plan = list(self._batches(queries, params))
        for layers in self._plan:
            self._evict(slots, layers, layers.of(queries[:, self.here]))

    def _batches(self, queries: Tensor, params: Sequence[AttentionParams]) -> Iterator[Layers]:
        """Layers whose attention is alike, as many at once as the workspace holds."""
        alike: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alike.setdefault((how.scaling, how.softcap, how.sliding_window, how.sinks is None), []).append(index)
        policy, (_, rows, heads, most) = self.group.policy, self.where.shape
        window, reads = policy.needs.queries_decoding, policy.value is not None or policy.merger.merges
        numbers = queries.shape[2] * max(1, window) + (2 * heads * queries.shape[-1] if window or reads else 0)
        each = 4 * rows * most * numbers
        at_once = max(1, WORKSPACE // each) if layers_alike(policy) else 1
        for some in alike.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                sinks = [params[index].sinks for index in chosen]
                if sinks[0] is not None:
                    own = torch.cat([x for x in sinks if x is not None])
                    how = how._replace(sinks=own.repeat_interleave(rows, dim=0))
                yield Layers(chosen, how)

    def _evict(self, slots: DeviceSlots, layers: Layers, queries: Tensor) -> None:
        group, policy, (count, rows) = self.group, self.group.policy, queries.shape[:2]
        held = DeviceRows(slots, layers, self)
        budgets = tuple(b for index in layers.chosen for b in group.budgets.of(index, [True] * rows))
        places = slots.places[self.here].repeat(count, 1)
        now = decoded(places, evicts=True, ends=(0,) * len(places))
        recent = self._newest(layers, queries, places)
        shared = group.shared
        if policy.rates:
            shared = {name: x.repeat(count, *[1] * (x.dim() - 1)) for name, x in shared.items()}
        seen = _Seen(
            held,
            layer=layers.chosen[0],
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=held.positions,
            seen=now.seen,
            scaling=layers.params.scaling,
            phase="decode",
            recent_queries=recent and recent[0],
            recent_positions=recent and recent[1],
            sighted=recent is not None and group.layers[0].recent.real and keeps_window(policy, budgets),
            softcap=layers.params.softcap,
            sliding_window=layers.params.sliding_window,
            sinks=layers.params.sinks,
            ascending=False,
            aligned=True,
            whole=False,
            opens=now.opens,
            budgets=budgets,
            prompts=tuple(group.progress.prompt) * count,
            shared=shared,
        )
        if self.reads_newest:
            assert slots.drawn is not None
            seen.told(slots.drawn[held.where].transpose(-1, -2)[:, :, :, None])
        memory = {name: layers.of(x).flatten(0, 1) for name, x in self._memory.items()}
        layer = group.layers[layers.chosen[0]].like(held, group.layers[0].recent, memory, [b + 1 for b in budgets])
        evict([Pending(group, layer, LayerStep(seen.queries, now, layers.params, held, False, lambda _: seen))])
        for name, x in layer.memory.items():
            own = x.view(count, rows, *x.shape[1:])
            if name not in self._memory:
                self._memory[name] = own.new_zeros(len(group.layers), *own.shape[1:])
            layers.put(self._memory[name], own)

    def _newest(self, layers: Layers, queries: Tensor, places: Tensor) -> tuple[Tensor, Tensor] | None:
        """The window [n,H_q,w,D] after queries [k,b,H_q,1,D] at places [n,1], and its positions [n,w]."""
        if self._window is None:
            return None
        found = []
        for x, new in zip(self._window, (queries, places.view(*queries.shape[:2], 1)), strict=True):
            dim = 3 if x is self._window[0] else 2
            own = torch.cat([layers.of(x).narrow(dim, 1, x.shape[dim] - 1), new], dim)
            layers.put(x, own)
            found.append(own.flatten(0, 1))
        return found[0], found[1]

    # --- the end ---------------------------------------------------------------------------------------------------
    def came_back(self, layer: int, units: Sequence[Unit], free: Tensor) -> list[Unit]:
        """A layer's units as they go on by themselves, where they lie; free [b,H]: the empty slots of what evicts."""
        segments, grown = self._segments[layer], None if self.evicts else self._taken
        own = free.split([unit.sequences for unit in units])
        return [unit.came_back(s, grown, slots) for unit, s, slots in zip(units, segments, own, strict=True)]

    def state(self, layer: int, held: LayerStore, rows: slice = ALL) -> LayerState:
        """A layer of some of the sequences as it is now, its tensors its own; held: what it holds of them."""
        before, grown = self.group.layers[layer], 0 if self.evicts else self._taken
        recent = RecentQueries.of_rows([(before.recent, row) for row in range(self.size)[rows]])
        if self._window is not None:
            recent.hold(*(x[layer][rows].clone() for x in self._window))
        memory = {name: x[layer][rows].clone() for name, x in self._memory.items()}
        return before.like(held, recent, memory, [n + grown for n in before.counts[rows]])

    def copied(self, layer: int, units: Sequence[Unit], free: Tensor, row: int) -> LayerState:
        """A layer of one sequence as it is now, in memory of its own."""
        place = row
        for unit in self.came_back(layer, units, free):
            if place < unit.sequences:
                break
            place -= unit.sequences
        return self.state(layer, unit.copied_out(place), slice(row, row + 1))


class DeviceRows(LayerStore):
    """What some layers hold of a policy's sequences, as n rows: copies, in which shorter heads end in empty slots."""

    packed = False
    ascending = False

    def __init__(self, slots: DeviceSlots, layers: Layers, group: DeviceGroup) -> None:
        self._slots, self._layers, self._group = slots, layers, group
        self._shape = -1, *group.where.shape[2:]
        self.where = layers.of(group.where).view(self._shape)  # [n,H,T] in the memory of all layers
        self._state: State | None = None

    @property
    def keys(self) -> Tensor:
        return self._read(self._slots.keys)

    @property
    def values(self) -> Tensor:
        return self._read(self._slots.values)

    def _read(self, memory: LayerRows) -> Tensor:
        inside = self.where.view(len(self._layers.chosen), -1) - self._layers.of(self._slots.before)[:, :, 0]
        return memory.read(inside, self._layers.chosen).view(*self.where.shape, -1)

    @property
    def positions(self) -> Tensor:
        return self._slots.positions[self.where]

    @property
    def state(self) -> State:
        if self._state is None:
            there = self._statistics_at()
            self._state = {name: x[there] for name, x in self._group.statistics.items()}
        return self._state

    def remember(self, state: State) -> None:
        there = self._statistics_at()
        for name, x in state.items():
            self._group.statistics[name][there] = x

    def _statistics_at(self) -> Tensor:
        return self._layers.of(self._group.where_statistics).view(self._shape)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "layers with a bias do not decode on the device"
        count = len(self._layers.chosen)
        there = self._heads(self._slots.starts)[..., None] + slots.view(count, -1, *slots.shape[1:])
        for memory, new in ((self._slots.keys, keys), (self._slots.values, values)):
            memory.write(there.flatten(1), new.reshape(count, -1, new.shape[-1]), self._layers.chosen)

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        assert rows is None, "every sequence evicts"
        starts, before = self._heads(self._slots.starts), self._layers.of(self._slots.before)
        free = slots.view(starts.shape)
        self._layers.put(self._slots.free[:, self._group.here], free)
        self._slots.positions.index_fill_(0, (starts + before + free).flatten(), -1)

    def _heads(self, x: Tensor) -> Tensor:
        """[k,b,H] of a tensor [L,B,H]."""
        return self._layers.of(x[:, self._group.here])

    @property
    def nbytes(self) -> int:
        return 0

    spare_nbytes = nbytes

    def expect(self, tokens: int) -> None:
        raise AssertionError("rows of a device batch only evict")

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        raise AssertionError("rows of a device batch only evict")

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        raise AssertionError("rows of a device batch evict one token each")


class _Seen(Observation):
    """What the policy sees of the rows; their keys and values are copied only for scores that read them."""

    def __init__(self, held: DeviceRows, **known: Any) -> None:  # noqa: ANN401
        self.__dict__.update(known, _held=held, _known={})

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("keys", "values"):
            raise AttributeError(f"an observation has no {name}")
        found: Tensor = getattr(self._held, name)
        self.__dict__[name] = found
        return found

"""Evictions of a `DeviceBatch`: sequences of one rule evict together, several layers as rows of one batch.

Shapes: L layers, P rows of a step, b of them in a part, k layers evicted at once, n = k * b, H_q query heads, H KV
heads, T slots of the longest segment, w queries of a window, D head dim.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.cache.arena import EMPTY, Arena
from kvbench.cache.eviction import evict_one
from kvbench.cache.rows import LazyObservation, numbers_of_a_slot
from kvbench.cache.sequence import Sequence
from kvbench.cache.step import keeps_window
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import (
    AttentionParams,
    Memory,
    Observation,
    QueryWindow,
    SequenceInfo,
    SlotInfo,
    StepCache,
    known_weights,
)
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking

WORKSPACE = 2**29  # bytes of keys, values and attention rows of an eviction in memory at once
WINDOW = "window queries", "window positions"  # names of the tensors of a window, beside those of mergers


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


def kind_of(sequence: Sequence, slots: int) -> Kind:
    """The kind of a sequence whose decoding evicts."""
    policy = sequence.policy
    budgets = tuple(sequence.budgets.shares)
    memory = tuple((name, x.shape) for name, x in sequence.layers[0].memory.items())
    reads_prompt = policy.schedule.protect == "prompt" or policy.pre_pass is not None
    return Kind(
        rule=(sequence.rule, memory),
        budgets=budgets,
        slots=slots if policy.allocator.per_head else min(slots, max(budgets) + 1),
        prompt=sequence.budgets.prompt if reads_prompt else -1,
        see_own=keeps_window(policy, budgets),
        policy=policy,
    )


def rows_of_parts(kinds: List[Kind]) -> Iterator[slice]:
    """The rows that evict together: of one rule, and at least half as long as the longest, to which they are padded.

    kinds: of the rows, sorted by rule and then by length, the longest first.
    """
    first = 0
    for row in range(1, len(kinds) + 1):
        longest = kinds[first]
        if row == len(kinds) or kinds[row].rule != longest.rule or 2 * kinds[row].slots < longest.slots:
            if longest.rule is not None:
                yield slice(first, row)
            first = row


class Part:
    """Rows of a step that evict by one rule.

    lengths: of these rows (`DeviceBatch`). state: windows, and memory of mergers, [L,b,...] by name.
    """

    def __init__(
        self, kinds: List[Kind], rows: slice, arena: Arena, lengths: Mapping[str, Tensor], state: dict[str, Tensor]
    ) -> None:
        self.kinds, self.rows, self.state, self.policy = kinds, rows, state, kinds[0].policy
        self.arena, self.lengths = arena, {name: x[:, rows] for name, x in lengths.items()}
        self.columns = torch.arange(max(kind.slots for kind in kinds), device=arena.positions.device)
        self._plan: list[tuple[tuple[int, ...], AttentionParams]] = []  # layers that evict at once
        self.shared: dict[str, Tensor] = {}  # data that scorers of several layers exchange within a step

    def evict(self, queries: Tensor, params: List[AttentionParams]) -> None:
        """Evict in all layers. queries [L,b,H_q,1,D]: the newest; params: of the attention of each layer."""
        self.shared.clear()
        self._plan = self._plan or list(self._planned(queries, params))
        for layers, how in self._plan:
            which = _select(layers, queries.device)
            self._evict(layers, which, how, queries[which])

    def _planned(
        self, queries: Tensor, params: List[AttentionParams]
    ) -> Iterator[tuple[tuple[int, ...], AttentionParams]]:
        """Layers with equal attention, as many at once as fit the workspace, and the parameters of their attention."""
        policy, rows, stored = self.policy, len(self.kinds), (1, self.lengths["starts"].shape[2], 1, queries.shape[-1])
        equal: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alike = (*how[:3], how.sinks is None) if policy.layers_alike else index
            equal.setdefault(alike, []).append(index)
        slot = numbers_of_a_slot(policy, queries.shape[2], stored, stored)
        at_once = max(1, WORKSPACE // (4 * rows * len(self.columns) * slot))
        for some in equal.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                if how.sinks is not None:
                    sinks = torch.cat([x for index in chosen if (x := params[index].sinks) is not None])
                    how = how._replace(sinks=sinks.repeat_interleave(rows, dim=0))
                yield chosen, how

    def _evict(self, layers: tuple[int, ...], which: slice | Tensor, how: AttentionParams, queries: Tensor) -> None:
        """Evict in some layers, `which` as an index; queries [k,b,H_q,1,D]."""
        rows = FlatRows(self, layers, which, how, queries)
        if rows.state:
            self.policy.observe(rows.observation, rows.state)
            rows.store_state()
        evict_one(rows)

    def window(self, which: slice | Tensor, queries: Tensor, places: Tensor) -> QueryWindow:
        """Append queries [k,b,H_q,1,D] at places [n,1] to the windows and return them for n rows."""
        found = []
        for name, new, dim in zip(WINDOW, (queries, places.view(*queries.shape[:2], 1)), (3, 2), strict=True):
            x = self.state[name]
            own = torch.cat([x[which].narrow(dim, 1, x.shape[dim] - 1), new], dim)
            x[which] = own
            found.append(own.flatten(0, 1))
        return QueryWindow(found[0], found[1], see_own=all(kind.see_own for kind in self.kinds))


class FlatRows:
    """Rows of a part: k layers of b sequences in flat memory, n = k * b. queries [k,b,H_q,1,D]: the newest."""

    packed = False

    def __init__(
        self, part: Part, layers: tuple[int, ...], which: slice | Tensor, how: AttentionParams, queries: Tensor
    ) -> None:
        arena, policy = part.arena, part.policy
        self.policy, self.layer = policy, layers[0] if len(layers) == 1 else -1
        self._part, self._layers, self._which, self._arena = part, layers, which, arena
        self._starts, self._counts, free, limit = (
            part.lengths[x][which] for x in ("starts", "counts", "free", "limit")
        )
        self._free, self._full = free, self._counts == limit  # the other sequences have taken one more slot instead
        self.evicting: Tensor | None = self._full.flatten(0, 1)[:, 0]
        self._offsets, there = arena.offsets[which], part.columns < self._counts[..., None]
        inside = torch.where(there, self._starts[..., None] + part.columns, EMPTY)  # [k,b,H,T]
        self._slots = FlatSlots([arena.memory[layer] for layer in layers], inside)
        self._where = (inside + self._offsets[..., None]).flatten(0, 1)  # the same in all layers, [n,H,T]
        width = queries.shape[2] // self._starts.shape[2] if policy.needs.query_heads else 1
        self._stored = {name: arena.statistics[name, width].flatten(0, 1) for name in policy.needs.statistics}
        self.state = {name: x[self._where] for name, x in self._stored.items()}
        self.observation = self._observe(how, queries)

    def store_state(self) -> None:
        """Write the statistics back."""
        for name, x in self.state.items():
            self._stored[name][self._where] = x

    @property
    def vectors(self) -> tuple[Vectors, Vectors]:
        return Vectors([self.observation.keys]), Vectors([self.observation.values])

    @property
    def memory(self) -> Memory:
        return {name: x[self._which].flatten(0, 1) for name, x in self._part.state.items() if name not in WINDOW}

    def store_memory(self, memory: Memory) -> None:
        for name, x in memory.items():
            self._part.state[name][self._which] = x.view(*self._starts.shape[:2], *x.shape[1:])

    def note_nan(self, ranking: Ranking) -> None:
        self._part.lengths["nan"][self._which] |= ranking.broken.view(self._starts.shape[:2])

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._slots.write(slots, "keys", keys)
        self._slots.write(slots, "values", values)

    def release(self, slots: Tensor) -> None:
        chosen = torch.minimum(slots.view(self._starts.shape), self._counts - 1)  # of padding, it may be any slot
        evicted, positions = (self._starts + self._offsets + chosen).flatten(), self._arena.positions.view(-1)
        positions[evicted] = positions[evicted].masked_fill(self._full.flatten(), -1)
        self._part.lengths["free"][self._which] = torch.where(self._full, chosen, self._free)

    def _observe(self, how: AttentionParams, queries: Tensor) -> Observation:
        arena, part, count = self._arena, self._part, len(self._layers)
        places = part.lengths["next"][0].repeat(count, 1)
        known: StepCache = {}
        if self.policy.needs.newest_row:
            assert arena.weights is not None
            known = known_weights(arena.weights.flatten(0, 1)[self._where].transpose(-1, -2)[:, :, :, None])
        return LazyObservation(
            self._slots.vectors,
            layer=self._layers[0],
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=arena.positions.view(-1)[self._where],
            seen=places[:, 0] + 1,
            phase="decode",
            params=how,
            window=part.window(self._which, queries, places) if WINDOW[0] in part.state else None,
            slots=SlotInfo(ascending=False, whole=False),
            sequences=SequenceInfo(
                opens=(True,) * len(places),
                budgets=tuple(kind.budgets[index] for index in self._layers for kind in part.kinds),
                prompts=tuple(kind.prompt for kind in part.kinds if kind.prompt >= 0) * count,
            ),
            shared=part.shared,
            known=known,
        )


@dataclass(frozen=True)
class FlatSlots:
    """Slots [k,b,H,T] of k layers in their memories, which hold keys and values by name."""

    memories: List[Mapping[str, Tensor]]
    inside: Tensor

    def vectors(self, name: str) -> Tensor:
        """Keys or values [n,H,T,D]."""
        return torch.cat([memory[name][own] for memory, own in zip(self.memories, self.inside, strict=True)])

    def write(self, slots: Tensor, name: str, new: Tensor) -> None:
        """Replace keys or values by new ones [n,H,k,D] at slots [n,H,k]."""
        count = len(self.memories)
        into = self.inside.flatten(0, 1).gather(-1, slots).view(count, -1)
        for memory, own, x in zip(self.memories, into, new.reshape(count, -1, new.shape[-1]), strict=True):
            memory[name].index_copy_(0, own, x.to(memory[name].dtype))


def _select(layers: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """An index of some layers in a tensor [L,...], for a view if they follow one another."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if last - first + 1 == len(layers) else on_device(layers, device)

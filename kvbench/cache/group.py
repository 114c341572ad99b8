"""Groups: sequences of a table that evict by one rule, several layers at once as rows of one batch.

Shapes: L layers, P rows of a step, b of them in a group, k layers evicted at once, n = k * b, H_q query heads, H KV
heads, T slots of the longest segment, w queries of a window, D head dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.attend.backend import Backend, GroupSlots, Segments
from kvbench.cache.memory import FlatMemory
from kvbench.cache.rows import LazyLatents, LazyObservation, Rows, evict
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import keeps_window
from kvbench.policies.constants import on_device
from kvbench.policies.latents import of_all_heads
from kvbench.policies.mergers.merger import OneEviction
from kvbench.policies.observation import (
    AttentionParams,
    Memory,
    Observation,
    QueryWindow,
    SequenceInfo,
    SlotInfo,
    StepCache,
)
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking

SIMILAR = (
    0.75  # layers evict at once if each has at least this share of the longest one's slots, to which all are padded
)
WINDOW = "window queries", "window positions"  # names of the tensors of a window, beside those of parts


@dataclass(frozen=True)
class Kind:
    """What a recorded step has as constants of a sequence.

    rule: of evictions; None if decoding does not evict. budgets: of each layer. slots: bound of a segment's length.
    numbers: those of the sequence that the policy reads (`Needs.reads`), in the order of their names.
    see_own: whether each query of the window sees its own token.
    """

    rule: object = None
    budgets: tuple[int, ...] = ()
    slots: int = 0
    numbers: tuple[int, ...] = ()
    see_own: bool = False
    policy: Policy = field(compare=False, default_factory=Policy)

    def longest(self, layer: int) -> int:
        """Bound of the length of a segment in a layer."""
        every = self.policy.schedule.every
        return self.slots if self.policy.allocator.per_head else min(self.slots, self.budgets[layer] + every)


def kind_of(sequence: CachedSequence, slots: int) -> Kind:
    """The kind of a sequence whose decoding evicts."""
    policy = sequence.policy
    budgets = tuple(sequence.budgets.shares)
    memory = tuple((name, x.shape) for name, x in sequence.layers[0].memory.items())
    return Kind(
        rule=(sequence.rule, policy.schedule.every, memory),
        budgets=budgets,
        slots=slots if policy.allocator.per_head else min(slots, max(budgets) + policy.schedule.every),
        numbers=tuple(sequence.budgets.numbers[name] for name in policy.needs.reads),
        see_own=keeps_window(policy, budgets),
        policy=policy,
    )


def groups_of(kinds: Sequence[Kind]) -> Iterator[slice]:
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


class Group:
    """Rows of a step that evict by one rule, in layers of equal shapes, which are numbered among these.

    layers: their numbers among all attention layers. lengths: of these rows (`LayerSet`). state: windows, and memory of
    scorers and mergers, [L,b,...] by name.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kinds: Sequence[Kind],
        rows: slice,
        memory: FlatMemory,
        lengths: Mapping[str, Tensor],
        state: dict[str, Tensor],
    ) -> None:
        self.layers, self.kinds, self.rows, self.state, self.policy = layers, kinds, rows, state, kinds[0].policy
        self.memory, self.lengths = memory, {name: x[:, rows] for name, x in lengths.items()}
        longest = self.longest(range(len(lengths["starts"])))
        self.columns = torch.arange(longest, device=memory.positions.device)
        self._plan: list[tuple[int, ...]] = []  # layers that evict at once
        self.shared: dict[str, Tensor] = {}  # data that scorers of several layers exchange within a step

    def has(self, row: int) -> bool:
        """Whether a row of the step is one of the group."""
        return bool(self.rows.start <= row < self.rows.stop)

    def evict(
        self, queries: Tensor, params: Sequence[AttentionParams], backend: Backend, sequences: Sequence[CachedSequence]
    ) -> None:
        """Evict in all layers. queries [L,b,H_q,1,D]: the newest; params: of the attention of each layer."""
        self.shared.clear()
        needs = self.policy.needs
        if not (self.policy.schedule.one_each or needs.statistics or needs.memory):  # only the window moves on
            if WINDOW[0] in self.state:
                self.window(slice(None), queries, self.lengths["next"][0].repeat(len(queries), 1))
            return
        ratings = [sequence.given.pop("ratings") for sequence in sequences if "ratings" in sequence.given]
        self._plan = self._plan or list(self._planned(queries, params, backend.workspace))
        for layers in self._plan:
            if ratings:  # one number for the new token of every row
                self.shared["ratings"] = torch.cat(ratings).repeat(len(layers), 1)
            which = _select(layers, queries.device)
            evict(GroupRows(self, layers, which, _joined(params, layers, len(self.kinds)), queries[which], backend))

    def _planned(self, queries: Tensor, params: Sequence[AttentionParams], workspace: int) -> Iterator[tuple[int, ...]]:
        """Layers with equal attention and similar lengths, as many at once as fit the workspace."""
        policy, rows, heads = self.policy, len(self.kinds), self.lengths["starts"].shape[2]
        equal: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alone = policy.needs.layer or how.latents is not None
            alike = index if alone else (*how[:3], how.sinks is None)
            equal.setdefault(alike, []).append(index)
        slot = 4 * rows * numbers_of_a_slot(policy, queries.shape[2], heads, queries.shape[-1])
        for some in equal.values():
            rest = sorted(some, key=lambda index: -self.longest([index]))
            while rest:
                longest = self.longest(rest[:1])
                similar = [index for index in rest if self.longest([index]) >= SIMILAR * longest]
                found = tuple(sorted(similar[: max(1, workspace // (slot * longest))]))
                yield found
                rest = [index for index in rest if index not in found]

    def longest(self, layers: Sequence[int]) -> int:
        """Bound of the length of a segment in some layers."""
        return max(kind.longest(self.layers[layer]) for kind in self.kinds for layer in layers)

    def window(self, which: slice | Tensor, queries: Tensor, places: Tensor) -> QueryWindow:
        """Append queries [k,b,H_q,1,D] at places [n,1] to the windows and return them for n rows."""
        found = []
        for name, new, dim in zip(WINDOW, (queries, places.view(*queries.shape[:2], 1)), (3, 2), strict=True):
            x = self.state[name]
            own = torch.cat([x[which].narrow(dim, 1, x.shape[dim] - 1), new], dim)
            x[which] = own
            found.append(own.flatten(0, 1))
        return QueryWindow(found[0], found[1], see_own=all(kind.see_own for kind in self.kinds))


class GroupRows(Rows):
    """Rows of a group: k layers of b sequences, n = k * b, that lose one token each. queries [k,b,H_q,1,D]: the newest.

    Rows below their budget lose none: they have taken one more slot instead. Rows that evict `every` tokens at once are
    only observed: they leave the table for their evictions.
    """

    def __init__(
        self, group: Group, layers: tuple[int, ...], which: slice | Tensor, how: AttentionParams, queries: Tensor,
        backend: Backend,
    ) -> None:  # fmt: skip
        self.policy, self.layer = group.policy, group.layers[layers[0]] if len(layers) == 1 else -1
        self._group, self._which = group, which
        self._starts, self._counts, self._free, limit = (
            group.lengths[x][which] for x in ("starts", "counts", "free", "limit")
        )
        self._full = self._counts == limit
        self._going = self._full.flatten(0, 1)[:, 0]  # rows that evict a token, bool [n]
        columns = group.columns[: group.longest(layers)]
        width = queries.shape[2] // self._starts.shape[2] if self.policy.needs.query_heads else 1
        segments = Segments(layers, which, group.rows, self._starts, self._counts, columns)
        self.slots: GroupSlots = backend.slots(group.memory, segments, self.policy.needs.statistics, width)
        self.state = self.slots.state
        self.observation = self._observe(layers, how, queries)

    def is_due(self) -> bool:
        return self.policy.schedule.one_each

    def store(self) -> None:
        self.slots.store_state()
        self.store_memory(self.observation.memory)

    def free(self, ranking: Ranking) -> None:
        """The next token overwrites the slot of the evicted one."""
        policy, seen, state = self.policy, self.observation, self.state
        victims, going = ranking.victim(), self._going[:, None, None]
        if policy.merger.merges:
            memory, vectors = self.memory, (self.slots.vectors("keys"), self.slots.vectors("values"))
            eviction = OneEviction(
                self.layer, seen.phase, *vectors, seen.positions, state, victims, going, self.slots.packed
            )
            merged = policy.merger.absorb_one(eviction, memory)
            self.store_memory(memory)
            if merged is not None:
                assert merged.bias is None, "mergers fit a bias only if several tokens are evicted"
                self.slots.write(merged.slots, merged.keys, merged.values)
        if policy.scorer is not None and policy.needs.kept:
            policy.scorer.selected(seen, ranking.occupied.scatter(-1, victims, ~going.expand_as(victims)))
        self.release(victims)

    @property
    def memory(self) -> Memory:
        """Data of the scorer and of the merger, [n,...] by name."""
        return {name: x[self._which].flatten(0, 1) for name, x in self._group.state.items() if name not in WINDOW}

    def store_memory(self, memory: Memory) -> None:
        """Write the data back."""
        for name, x in memory.items():
            self._group.state[name][self._which] = x.view(*self._starts.shape[:2], *x.shape[1:])

    def note_nan(self, ranking: Ranking) -> None:
        self._group.lengths["nan"][self._which] |= ranking.broken.view(self._starts.shape[:2])

    def release(self, slots: Tensor) -> None:
        """Empty one slot per KV head, [n,H,1]."""
        chosen = torch.minimum(slots.view(self._starts.shape), self._counts - 1)  # of padding, it may be any slot
        memory = self._group.memory
        evicted, positions = (self._starts + memory.offsets[self._which] + chosen).flatten(), memory.positions.view(-1)
        positions[evicted] = positions[evicted].masked_fill(self._full.flatten(), -1)
        self._group.lengths["free"][self._which] = torch.where(self._full, chosen, self._free)

    def _observe(self, layers: tuple[int, ...], how: AttentionParams, queries: Tensor) -> Observation:
        group, count, needs = self._group, len(layers), self.policy.needs
        places, kinds, slots = group.lengths["next"][0].repeat(count, 1), group.kinds, self.slots
        latents, known = how.latents, slots.known if how.latents is None else StepCache()

        def stored(name: str) -> Tensor:
            return slots.vectors(name).whole()

        return (LazyObservation if latents is None else LazyLatents)(
            stored if latents is None else lambda name: of_all_heads(stored, latents, known)[name == "values"],
            **({"layer": self.layer} if count == 1 else {}),
            queries=queries.flatten(0, 1),
            query_positions=places,
            positions=self.slots.positions,
            seen=places[:, 0] + 1,
            phase="decode",
            params=how,
            window=group.window(self._which, queries, places) if WINDOW[0] in group.state else None,
            slots=SlotInfo(ascending=False, whole=False, packed=slots.packed, bias=slots.bias),
            sequences=SequenceInfo(
                opens=(True,) * len(places),
                budgets=tuple(kind.budgets[group.layers[index]] for index in layers for kind in kinds),
                **self._numbers(count),
            ),
            shared=group.shared,
            known=known,
            memory=self.memory if needs.memory else {},
        )

    def _numbers(self, layers: int) -> dict[str, Any]:
        """The numbers of the sequences that the policy reads, for rows of some layers."""
        each = zip(self.policy.needs.reads, *(kind.numbers for kind in self._group.kinds), strict=True)
        return {name: tuple(numbers) * layers for name, *numbers in each}


def numbers_of_a_slot(policy: Policy, query_heads: int, heads: int, dim: int) -> int:
    """Numbers of a slot in an eviction: attention of the window, and its key and value if the policy uses them."""
    window, merges = policy.needs.window_decoding or 0, policy.merger.merges
    numbers = query_heads * max(1, window) + (heads * dim if window or merges else 0)
    return numbers + (heads * dim if policy.value is not None or merges else 0)


def _joined(params: Sequence[AttentionParams], layers: tuple[int, ...], rows: int) -> AttentionParams:
    """The parameters of the attention of some layers, for all of their rows."""
    how = params[layers[0]]
    if how.sinks is None:
        return how
    sinks = torch.cat([x for index in layers if (x := params[index].sinks) is not None])
    return how._replace(sinks=sinks.repeat_interleave(rows, dim=0))


def _select(layers: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """An index of some layers in a tensor [L,...], for a view if they follow one another."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if last - first + 1 == len(layers) else on_device(layers, device)

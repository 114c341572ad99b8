"""Evictions of a `DeviceBatch`: sequences of one rule evict together, several layers as rows of one batch.

Shapes: L layers, P rows of a step, b of them in a part, k layers evicted at once, n = k * b, H_q query heads, H KV
heads, T slots of the longest segment, w queries of a window, D head dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.cache.arena import EMPTY, Arena
from kvbench.cache.eviction import observe, select_one
from kvbench.cache.group import PolicyGroup, keeps_window
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, Observation, QueryWindow, SequenceInfo, SlotInfo
from kvbench.policies.policy import Policy
from kvbench.policies.stacked import LazyObservation

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


def kind_of(group: PolicyGroup, slots: int) -> Kind:
    """The kind of a sequence whose decoding evicts."""
    policy = group.policy
    budgets = tuple(group.budgets.of(layer.index, [True])[0] for layer in group.layers)
    memory = tuple((name, x.shape) for name, x in group.layers[0].memory.items())
    return Kind(
        rule=(group.rule, policy.schedule.protect, memory),
        budgets=budgets,
        slots=slots if policy.allocator.per_head else min(slots, max(budgets) + 1),
        prompt=group.progress.prompt[0] if policy.schedule.protect == "prompt" or policy.pre_pass is not None else -1,
        see_own=all(layer.recent.real for layer in group.layers) and keeps_window(policy, budgets),
        policy=policy,
    )


class Part:
    """Rows of a step that evict by one rule.

    lengths: of these rows (`DeviceBatch`). state: windows, and memory of mergers, [L,b,...] by name.
    """

    def __init__(
        self, kinds: Sequence[Kind], rows: slice, arena: Arena, lengths: Mapping[str, Tensor], state: dict[str, Tensor]
    ) -> None:
        self.kinds, self.rows, self.state, self.policy = kinds, rows, state, kinds[0].policy
        self._arena, self._lengths = arena, {name: x[:, rows] for name, x in lengths.items()}
        self._columns = torch.arange(max(kind.slots for kind in kinds), device=arena.positions.device)
        self._plan: list[tuple[tuple[int, ...], AttentionParams]] = []  # layers that evict at once
        self._shared: dict[str, Tensor] = {}  # data that scorers of several layers exchange within a step

    def evict(self, queries: Tensor, params: Sequence[AttentionParams]) -> None:
        """Evict in all layers. queries [L,b,H_q,1,D]: the newest; params: of the attention of each layer."""
        self._shared.clear()
        self._plan = self._plan or list(self._planned(queries, params))
        for layers, how in self._plan:
            which = _select(layers, queries.device)
            self._evict(layers, which, how, queries[which])

    def _planned(
        self, queries: Tensor, params: Sequence[AttentionParams]
    ) -> Iterator[tuple[tuple[int, ...], AttentionParams]]:
        """Layers with equal attention, as many at once as fit the workspace, and the parameters of their attention."""
        policy, rows, heads = self.policy, len(self.kinds), self._lengths["starts"].shape[2]
        equal: dict[object, list[int]] = {}
        for index, how in enumerate(params):
            alike = (*how[:3], how.sinks is None) if policy.layers_alike else index
            equal.setdefault(alike, []).append(index)
        window, reads = policy.needs.window_decoding or 0, policy.value is not None or policy.merger.merges
        numbers = queries.shape[2] * max(1, window) + (2 * heads * queries.shape[-1] if window or reads else 0)
        at_once = max(1, WORKSPACE // (4 * rows * len(self._columns) * numbers))
        for some in equal.values():
            for begin in range(0, len(some), at_once):
                chosen, how = tuple(some[begin : begin + at_once]), params[some[begin]]
                if how.sinks is not None:
                    sinks = torch.cat([x for index in chosen if (x := params[index].sinks) is not None])
                    how = how._replace(sinks=sinks.repeat_interleave(rows, dim=0))
                yield chosen, how

    def _evict(self, layers: tuple[int, ...], which: slice | Tensor, how: AttentionParams, queries: Tensor) -> None:
        """Evict in some layers, `which` as an index; queries [k,b,H_q,1,D]."""
        arena, policy, (count, rows) = self._arena, self.policy, queries.shape[:2]
        starts, counts, free, limit = (self._lengths[name][which] for name in ("starts", "counts", "free", "limit"))
        offsets, there = arena.offsets[which], self._columns < counts[..., None]
        inside = torch.where(there, starts[..., None] + self._columns, EMPTY)  # [k,b,H,T]
        where = (inside + offsets[..., None]).flatten(0, 1)
        seen = self._observe(layers, which, how, queries, where, inside)
        width = queries.shape[2] // starts.shape[2] if policy.needs.query_heads else 1
        stored = {name: arena.statistics[name, width].flatten(0, 1) for name in policy.needs.statistics}
        state = {name: x[where] for name, x in stored.items()}
        if state:
            observe(policy, seen, state)
            for name, x in state.items():
                stored[name][where] = x
        memory = {name: x[which].flatten(0, 1) for name, x in self.state.items() if name not in WINDOW}
        vectors = [Vectors([seen.keys]), Vectors([seen.values])] if policy.merger.merges else ()
        ranking, nan = policy.rank(seen, state), self._lengths["nan"]
        nan[which] |= ranking.broken().view(count, rows)
        full = counts == limit  # the other sequences have taken one more slot instead
        index, evicting = layers[0] if len(layers) == 1 else -1, full.flatten(0, 1)[:, :1, None]
        chosen, merged = select_one(policy, ranking, seen, state, vectors, memory, evicting, index)
        for name, x in memory.items():
            self.state[name][which] = x.view(count, rows, *x.shape[1:])
        if merged is not None:
            into = inside.flatten(0, 1).gather(-1, merged[0]).view(count, -1)
            for memories, new in zip((arena.keys, arena.values), merged[1:], strict=True):
                for layer, slots, x in zip(layers, into, new.reshape(count, -1, new.shape[-1]), strict=True):
                    memories[layer].index_copy_(0, slots, x.to(memories[layer].dtype))
        chosen = torch.minimum(chosen.view(starts.shape), counts - 1)  # of padding, it may be any slot
        evicted, positions = (starts + offsets + chosen).flatten(), arena.positions.view(-1)
        positions[evicted] = positions[evicted].masked_fill(full.flatten(), -1)
        self._lengths["free"][which] = torch.where(full, chosen, free)

    def _observe(
        self,
        layers: tuple[int, ...],
        which: slice | Tensor,
        how: AttentionParams,
        queries: Tensor,
        where: Tensor,
        inside: Tensor,
    ) -> Observation:
        """Some layers as n rows; their slots in all layers, where [n,H,T], and in each, inside [k,b,H,T]."""
        arena, count, places = self._arena, len(layers), self._lengths["next"][0].repeat(len(layers), 1)

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
            window=self._window(which, queries, places) if WINDOW[0] in self.state else None,
            slots=SlotInfo(ascending=False, whole=False),
            sequences=SequenceInfo(
                aligned=True,
                opens=(True,) * len(places),
                budgets=tuple(kind.budgets[index] for index in layers for kind in self.kinds),
                prompts=tuple(kind.prompt for kind in self.kinds if kind.prompt >= 0) * count,
            ),
            shared=self._shared,
        )
        if self.policy.needs.newest_row:
            assert arena.weights is not None
            seen.store_weights(arena.weights.flatten(0, 1)[where].transpose(-1, -2)[:, :, :, None])
        return seen

    def _window(self, which: slice | Tensor, queries: Tensor, places: Tensor) -> QueryWindow:
        """Append queries [k,b,H_q,1,D] at places [n,1] to the windows and return them for n rows."""
        found = []
        for name, new, dim in zip(WINDOW, (queries, places.view(*queries.shape[:2], 1)), (3, 2), strict=True):
            x = self.state[name]
            own = torch.cat([x[which].narrow(dim, 1, x.shape[dim] - 1), new], dim)
            x[which] = own
            found.append(own.flatten(0, 1))
        return QueryWindow(found[0], found[1], see_own=all(kind.see_own for kind in self.kinds))


def _select(layers: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """An index of some layers in a tensor [L,...], for a view if they follow one another."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if last - first + 1 == len(layers) else on_device(layers, device)

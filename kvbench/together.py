"""The evictions after one decoded token, gathered over the layers and settled in a few launches.

While decoding, every layer at its budget gives up one token per KV head. That is little work in many small operations,
whose number is what it costs; layers that stand as rows of one batch share them. Each keeps what it would keep alone.

Shapes: n layers, B sequences, H_q query heads, H_kv KV heads, T slots of the fullest layer, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbench.policies.mergers.merger import Memory, OneEviction
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import padded
from kvbench.policies.stores.store import Held

WORKSPACE = 2**26  # bytes of float32 rows and vectors that stand side by side at once
PADDED = ("keys", "values")
STACKED = ("queries", "query_positions", "seen")
OWN = (*PADDED, *STACKED, "layer", "sinks", "recent_queries", "recent_positions", "occupied")  # each layer's own


@dataclass(frozen=True)
class Due:
    """A layer that holds one token too many in every KV head of every sequence."""

    held: Held
    memory: Memory
    observation: Observation


class Joined(Observation):
    """What n layers observed, as one with n * B sequences [n*B,...]; shorter ones are filled up with empty slots.

    What only some scores ask for, keys and values above all, is put side by side when somebody asks.
    """

    _parts: Sequence[Observation]

    def __init__(self, parts: Sequence[Observation]) -> None:
        positions = padded([part.positions for part in parts], fill=-1)
        self.__dict__.update(
            {name: x for name, x in vars(parts[0]).items() if name not in OWN},
            positions=positions,
            sighted=all(part.sighted for part in parts),
            ascending=all(part.ascending for part in parts),
            packed=all(part.packed and part.positions.shape[2] == positions.shape[2] for part in parts),
            sinks=None if any(part.sinks is None for part in parts) else torch.cat([_sinks(part) for part in parts]),
            opens=parts[0].opens * len(parts),
            budgets=tuple(budget for part in parts for budget in part.budgets),
            _known={},
            _parts=parts,
        )

    def __getattr__(self, name: str) -> Tensor:
        if name == "layer":
            raise AttributeError("several layers are scored at once: a scorer that reads the layer sets reads_layer")
        if name not in (*PADDED, *STACKED):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        parts = [getattr(part, name) for part in self._parts]
        joined = padded(parts) if name in PADDED else torch.cat(parts)
        self.__dict__[name] = joined
        return joined

    @cached_property
    def recent_queries(self) -> Tensor | None:
        return self._newest("recent_queries")

    @cached_property
    def recent_positions(self) -> Tensor | None:
        return self._newest("recent_positions")

    def _newest(self, name: str) -> Tensor | None:
        parts = [getattr(part, name) for part in self._parts]
        return None if parts[0] is None else torch.cat(parts)

    def window_attention(self, window: int) -> Tensor:
        if window == 1 and self.known_row is None:
            rows = [part.known_row for part in self._parts if part.known_row is not None]
            if len(rows) == len(self._parts):
                self._known["rows", 1] = padded(rows, dim=-1)
        return super().window_attention(window)

    def window_mean(self, window: int) -> Tensor:
        if self.packed:
            return super().window_mean(window)
        # Layers of different lengths: each by itself, so that no row is filled up; none outlives its sum.
        means = []
        for part in self._parts:
            means.append(part.window_mean(window))
            part.forget()
        return padded(means)


def _sinks(part: Observation) -> Tensor:
    """[B,H_q], a row for each sequence."""
    assert part.sinks is not None
    return part.sinks.expand(len(part.queries), -1)


def give_up(policy: Policy, due: Sequence[Due]) -> None:
    """Evict one token per KV head in all of these layers."""
    kinds: dict[tuple[object, ...], list[Due]] = {}
    for layer in due:
        kinds.setdefault(_kind(layer), []).append(layer)
    for kind in kinds.values():
        kind.sort(key=lambda layer: layer.observation.positions.shape[2])
        for some in _at_once(policy, kind):
            _give_up(policy, some)


def _kind(due: Due) -> tuple[object, ...]:
    """What layers have in common if they can stand as rows of one batch."""
    seen, memory = due.observation, due.memory
    queries, keys, values = ((x.shape[1], x.shape[3]) for x in (seen.queries, seen.keys, seen.values))
    arithmetic = seen.scaling, seen.softcap, seen.sliding_window, seen.sinks is None
    return queries, keys, values, seen.keys.dtype, seen.keys.device, arithmetic, tuple(memory)


def _give_up(policy: Policy, some: Sequence[Due]) -> None:
    """The same in layers of one kind, all at once."""
    joined = Joined([layer.observation for layer in some])
    states = [layer.held.state for layer in some]
    state = {name: padded([state[name] for state in states]) for name in states[0]}
    ranking = policy.rank(joined, state)
    victims = ranking.victim()
    if policy.merger.merges:
        _merge(policy, some, joined, state, victims)
    for layer, slots in zip(some, victims.chunk(len(some)), strict=True):
        layer.held.release(slots, None)


def _merge(policy: Policy, some: Sequence[Due], joined: Joined, state: State, victims: Tensor) -> None:
    """Let the tokens that go leave their trace in those that stay."""
    memory = {name: torch.cat([layer.memory[name] for layer in some]) for name in some[0].memory}
    eviction = OneEviction(
        -1, "decode", joined.keys, joined.values, joined.positions, state, victims, packed=joined.packed
    )
    merged = policy.merger.absorb_one(eviction, memory)
    rows = len(victims) // len(some)
    for i, layer in enumerate(some):
        own = slice(i * rows, (i + 1) * rows)
        layer.memory.update({name: x[own] for name, x in memory.items()})
        if merged is not None:
            layer.held.write(merged.slots[own], merged.keys[own], merged.values[own])


def _at_once(policy: Policy, due: Sequence[Due]) -> Iterator[Sequence[Due]]:
    """As many neighbouring layers as the workspace holds."""
    most = max(1, WORKSPACE // (_workspace(policy, due[-1].observation) * due[-1].observation.positions.shape[2]))
    for begin in range(0, len(due), most):
        yield due[begin : begin + most]


def _workspace(policy: Policy, observation: Observation) -> int:
    """Bytes for each slot of a layer: attention rows of the window, and keys and values where they are read."""
    batch, query_heads, _, dim = observation.queries.shape
    _, heads, _, value_dim = observation.values.shape
    window, merges = policy.queries_decoding, policy.merger.merges
    numbers = query_heads * max(1, window)
    numbers += heads * dim if window or merges else 0
    numbers += heads * value_dim if policy.value is not None or merges else 0
    return 4 * batch * numbers

"""The evictions after one decoded token, gathered over layers and caches and settled in a few launches.

While decoding, every layer at its budget gives up one token per KV head. That is little work in many small operations,
whose number is what it costs; layers that stand as rows of one batch share them, those of several caches too, as long
as their policies differ in the budget alone. Each keeps what it would keep alone.

Shapes: n layers, B sequences, H_q query heads, H_kv KV heads, T slots of the fullest layer, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kvbench.cache.eviction import EvictingLayer
from kvbench.cache.evidence import Evidence
from kvbench.policies.mergers.merger import MergeState, OneEviction, Vectors
from kvbench.policies.observation import Joining, Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import Held

WORKSPACE = {"cpu": 2**23}  # bytes of float32 rows and vectors that stand side by side at once: as a core's cache holds
LARGER = 2**26  # elsewhere, where launches cost more
FILLED = {"cpu": 2**14}  # scores that are filled up in less time than another round of launches takes
MORE = 2**20  # elsewhere
EVEN = 4  # layers of the same length that are enough to stand by themselves


@dataclass(frozen=True)
class PendingEviction:
    """A layer that holds one token too many in every KV head of the sequences that a step shows."""

    layer: EvictingLayer
    shown: Evidence

    @property
    def policy(self) -> Policy:
        return self.layer.policy

    @property
    def observation(self) -> Observation:
        return self.shown.observation

    @property
    def held(self) -> Held:
        return self.shown.held

    @property
    def memory(self) -> MergeState:
        """Of these sequences: views."""
        return {name: x[self.shown.rows] for name, x in self.layer.memory.items()}


def joining(observed: type[Observation]) -> dict[str, Joining]:
    """What becomes of every field of an observation in several layers; each has to say it."""
    hints = get_type_hints(observed, include_extras=True)
    said = {field.name: getattr(hints[field.name], "__metadata__", (None,))[0] for field in fields(observed)}
    known = {name: how for name, how in said.items() if isinstance(how, Joining)}
    silent = ", ".join(name for name in said if name not in known)
    assert not silent, f"{observed.__name__} does not say what becomes of {silent} in several layers"
    return known


JOINING = joining(Observation)
AT_ONCE = (Joining.COMMON, Joining.EVERY, Joining.LISTED)


class JointObservation(Observation):
    """What n layers observed, as one with n * B sequences [n*B,...]; shorter ones are filled up with empty slots.

    Tensors, which only some scores ask for, are put side by side when somebody asks.
    """

    _parts: Sequence[Observation]

    def __init__(self, parts: Sequence[Observation]) -> None:
        values = {name: _at_once(how, name, parts) for name, how in JOINING.items() if how in AT_ONCE}
        even = len({part.positions.shape[2] for part in parts}) == 1
        last = values["last"] if len({part.last for part in parts}) == 1 else None
        values |= {"packed": values["packed"] and even, "last": last, "_known": {}, "_parts": parts}
        self.__dict__.update(values)

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


def _at_once(how: Joining, name: str, parts: Sequence[Observation]) -> Any:  # noqa: ANN401 - the field's type
    values = (getattr(part, name) for part in parts)
    if how is Joining.EVERY:
        return all(values)
    return tuple(chain.from_iterable(values)) if how is Joining.LISTED else next(values)


def _when_read(name: str, how: Joining) -> cached_property[Tensor | None]:
    """A tensor of several layers, put together when it is read for the first time; refused where each has its own."""

    def tensor(layers: JointObservation) -> Tensor | None:
        if how is Joining.OWN:
            raise AttributeError(f"several layers are scored at once: a scorer that reads the {name} sets reads_{name}")
        parts = [getattr(part, name) for part in layers._parts]
        if parts[0] is None:
            return None
        if how is not Joining.STACKED:
            return padded(parts, fill=-1 if how is Joining.MARKED else 0)
        rows = [len(part.positions) for part in layers._parts]
        return torch.cat([x if len(x) == n else x.expand(n, -1) for x, n in zip(parts, rows, strict=True)])

    found = cached_property(tensor)
    found.__set_name__(JointObservation, name)
    return found


for _name, _how in JOINING.items():
    if _how not in AT_ONCE and not _name.startswith("_"):
        setattr(JointObservation, _name, _when_read(_name, _how))


def give_up(due: Sequence[PendingEviction]) -> None:
    """Evict one token per KV head in all of these layers."""
    kinds: dict[tuple[object, ...], list[PendingEviction]] = {}
    of_layer: dict[EvictingLayer, list[PendingEviction]] = {}  # its parts are of one kind
    for pending in due:
        if pending.layer not in of_layer:
            of_layer[pending.layer] = kinds.setdefault(_kind(pending), [])
        of_layer[pending.layer].append(pending)
    for kind in kinds.values():
        for some in _batches(kind):
            try:
                _give_up(some)
            except Exception as error:
                for pending in some:
                    pending.layer.cache.fail(error)


def _kind(due: PendingEviction) -> tuple[object, ...]:
    """What layers have in common if they can stand as rows of one batch."""
    seen, memory, keys = due.observation, due.layer.memory, due.observation.keys
    heads = seen.queries.shape[1::2], keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.recent_queries is None else seen.recent_queries.shape[2]
    arithmetic = seen.scaling, seen.softcap, seen.sliding_window, seen.sinks is None
    told = id(seen.shared) if seen.shared else None
    traces = tuple((name, x.shape[1:]) for name, x in memory.items()) if memory else ()
    return due.policy.rule, seen.phase, *heads, window, keys.dtype, keys.device, *arithmetic, traces, told


def _give_up(some: Sequence[PendingEviction]) -> None:
    """The same in layers of one kind, all at once."""
    policy = some[0].policy
    joined = JointObservation([layer.observation for layer in some])
    states = [layer.held.state for layer in some]
    state = {name: padded([state[name] for state in states]) for name in states[0]}
    ranking = policy.rank(joined, state)
    for row in ranking.broken():
        _note_broken(some, row)
    victims = ranking.victim()
    if policy.merger.merges:
        _merge(policy, some, joined, state, victims)
    for layer, slots in zip(some, victims.split(_rows(some)), strict=True):
        layer.held.release(slots, None)


def _rows(some: Sequence[PendingEviction]) -> list[int]:
    """Sequences of each layer."""
    return [layer.observation.positions.shape[0] for layer in some]


def _note_broken(some: Sequence[PendingEviction], row: int) -> None:
    """A row of the batch has a score that is no number: told to the cache whose sequence it is."""
    for pending, rows in zip(some, _rows(some), strict=True):
        if row < rows:
            first = pending.shown.rows.start or 0
            pending.layer.cache.note_broken(pending.layer.index, [first + row])
            return
        row -= rows


def _merge(
    policy: Policy, some: Sequence[PendingEviction], joined: JointObservation, state: State, victims: Tensor
) -> None:
    """Let the tokens that go leave their trace in those that stay."""
    memories = [pending.memory for pending in some]
    memory = {name: torch.cat([own[name] for own in memories]) for name in memories[0]}
    keys, values = (Vectors([getattr(each.held, name) for each in some]) for name in ("keys", "values"))
    packed = all(each.held.packed for each in some)
    eviction = OneEviction(-1, "decode", keys, values, joined.positions, state, victims, packed=packed)
    merged = policy.merger.absorb_one(eviction, memory)
    rows = _rows(some)
    for pending, *own in zip(some, *(x.split(rows) for x in memory.values()), strict=True):
        pending.layer.remember(pending.shown, dict(zip(memory, own, strict=True)))
    if merged is not None:
        new = (x.split(rows) for x in (merged.slots, merged.keys, merged.values))
        for pending, *own in zip(some, *new, strict=True):
            pending.held.write(*own)


def _batches(due: Sequence[PendingEviction]) -> Iterator[Sequence[PendingEviction]]:
    """Layers of one length stand together and need no masks; those of rare lengths are filled up to a similar one.

    As many at a time as the workspace holds.
    """
    lengths: dict[int, list[PendingEviction]] = {}
    for pending in due:
        lengths.setdefault(pending.observation.positions.shape[2], []).append(pending)
    policy, seen = due[0].policy, due[0].observation
    device, heads = seen.keys.device.type, seen.positions[..., 0].numel()
    space = WORKSPACE.get(device, LARGER)
    even = [length for length, some in lengths.items() if len(some) >= EVEN]
    rare = {length: len(lengths[length]) for length in sorted(lengths.keys() - set(even), reverse=True)}
    spare = min(space // 4 // _slot_bytes(policy, seen, even=False), FILLED.get(device, MORE) // heads)
    for alike in (*([length] for length in even), *_similar(rare, spare)):
        some = [pending for length in alike for pending in lengths[length]]
        most = max(1, space // _slot_bytes(policy, seen, even=len(alike) == 1) // alike[0])
        yield from (some[begin : begin + most] for begin in range(0, len(some), most))


def _similar(layers: dict[int, int], spare: int) -> Iterator[list[int]]:
    """Falling lengths, and how many layers have them, cut where more than a quarter would be filled up.

    Not for less than `spare` slots: filling them up takes less time than another round of launches.
    """
    some: list[int] = []
    filled = 0
    for length, count in layers.items():
        filled += count * (some[0] - length) if some else 0
        if some and 4 * length < 3 * some[0] and filled > spare:
            yield some
            some, filled = [], 0
        some.append(length)
    if some:
        yield some


def _slot_bytes(policy: Policy, observation: Observation, even: bool) -> int:
    """Bytes for each slot of a layer: keys and values where they are read, and attention rows of the window.

    Layers of different lengths look through their windows one after the other.
    """
    batch, query_heads, _, dim = observation.queries.shape
    _, heads, _, value_dim = observation.values.shape
    window, merges = policy.queries_decoding if even else 0, policy.merger.merges
    numbers = query_heads * max(1, window)
    numbers += heads * dim if window or merges else 0
    numbers += heads * value_dim if policy.value is not None or merges else 0
    return 4 * batch * numbers

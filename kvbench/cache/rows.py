"""Rows: layers of sequences that evict one token each, as one batch for the policy.

`PaddedRows` are layers with stores of their own; `kvbench.cache.device_batch` has rows in flat memory.

Shapes: n rows, H_q query heads, H_kv KV heads, T slots of the longest row, D head dim.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.cache.step import Step
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import Memory, Observation, QueryWindow, SequenceInfo, SlotInfo, State
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.slots import biases, padded

WORKSPACE = {"cpu": 2**23}  # bytes of float32 rows and vectors in memory at once: the cache of a core
WORKSPACE_GPU = 2**26  # more, because each launch costs time
PADDED = 0.75  # layers are padded to the longest one if they have at least this share of its slots


class Rows(Protocol):
    """What `evict_one` needs of n rows, and does with them.

    layer: index of the layer, -1 for several. packed: no slot of a layer is empty.
    """

    policy: Policy
    layer: int
    packed: bool
    observation: Observation

    @property
    def evicting(self) -> Tensor | None:
        """Rows that evict a token, bool [n]; None: all of them."""

    @property
    def state(self) -> State:
        """Running statistics [n,H_kv,T,G'] by name."""

    @property
    def vectors(self) -> tuple[Vectors, Vectors]:
        """Keys and values [n,H_kv,T,D]."""

    @property
    def memory(self) -> Memory:
        """Data of the merger, [n,...] by name."""

    def store_memory(self, memory: Memory) -> None: ...

    def note_nan(self, ranking: Ranking) -> None:
        """Note rows in which an unprotected token has the score NaN."""

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace keys and values [n,H_kv,k,D] at slots [n,H_kv,k]."""

    def release(self, slots: Tensor) -> None:
        """Empty one slot per KV head, [n,H_kv,1]."""


class PaddedRows:
    """Rows of steps, each of which evicts one token; shorter rows are padded with empty slots."""

    evicting: Tensor | None = None

    def __init__(self, steps: List[Step]) -> None:
        self._steps, self._stores = steps, [step.layer.store for step in steps]
        self._own = [step.layer.memory for step in steps]
        self.policy, self.layer = steps[0].policy, steps[0].layer.index if len(steps) == 1 else -1
        self.packed = all(store.slots.packed for store in self._stores)
        self.observation = stacked([step.observation for step in steps])

    @property
    def state(self) -> State:
        states = [store.state for store in self._stores]
        return {name: padded([state[name] for state in states]) for name in states[0]}

    @property
    def vectors(self) -> tuple[Vectors, Vectors]:
        return Vectors([store.keys for store in self._stores]), Vectors([store.values for store in self._stores])

    @property
    def memory(self) -> Memory:
        return {name: torch.cat([own[name] for own in self._own]) for name in self._own[0]}

    def store_memory(self, memory: Memory) -> None:
        for name, x in memory.items():
            for own, part in zip(self._own, x.split(1), strict=True):
                own[name] = part.clone() if len(self._own) > 1 else part

    def note_nan(self, ranking: Ranking) -> None:
        note_nan(self._steps, ranking)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for store, *new in zip(self._stores, *(x.split(1) for x in (slots, keys, values)), strict=True):
            store.write(*new)

    def release(self, slots: Tensor) -> None:
        for step, store, own in zip(self._steps, self._stores, slots.split(1), strict=True):
            store.release(own)
            step.layer.count -= 1


READ_AT_ONCE = ("cpu",)
"""Types of devices whose numbers the host reads without a wait."""


def note_nan(steps: List[Step], ranking: Ranking) -> None:
    """Note rows with a NaN score. The call continues for the others and ends with an error.

    The host does not wait for a GPU here: flags of a prompt are read at the end of its call, others by the audit.
    """
    later = ranking.scores.device.type not in READ_AT_ONCE
    if not later and not bool(ranking.scores.sum().isnan()):  # a tenth of the time of checking each score
        return
    for step, flag in zip(steps, ranking.broken.split(1), strict=True):
        sequence, index = step.sequence, step.layer.index
        if later:
            flags = sequence.nan_flags
            own = flag if steps[0].phase == "prompt" else flag.clone()  # of a block, it is written to
            flags[index] = flag | flags[index] if index in flags else own
        elif bool(flag) and sequence.nan_layer is None:
            sequence.nan_layer = index


class LazyObservation(Observation):
    """An observation whose keys and values are made on first use, because few scorers use both.

    vectors: makes them from their name. layer is missing if it combines several layers.
    """

    def __init__(self, vectors: Callable[[str], Tensor], **fields: Any) -> None:  # noqa: ANN401
        self.__dict__.update({"known": {}, "memory": {}, "shared": {}, "_vectors": vectors}, **fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Called for a field that was not made yet."""
        if name == "layer":
            raise AttributeError("several layers are scored at once: a scorer that uses the layer needs needs.layer")
        if name not in ("keys", "values"):
            raise AttributeError(f"an observation has no {name}")
        found = self.__dict__[name] = self._vectors(name)
        return found


def _vectors(parts: List[Observation], name: str) -> Tensor:
    """The keys or values of several observations, as rows."""
    return padded([getattr(part, name) for part in parts])


def stacked(parts: List[Observation]) -> Observation:
    """The observations of n layers as one of n * B sequences; shorter layers are padded with empty slots."""
    if len(parts) == 1:
        return parts[0]
    first, slots, sequences = parts[0], [part.slots for part in parts], [part.sequences for part in parts]
    same_length = len({part.positions.shape[2] for part in parts}) == 1
    sinks = [part.params.sinks.expand(len(part.seen), -1) for part in parts if part.params.sinks is not None]
    windows, window = [part.window for part in parts if part.window is not None], None
    if windows:
        queries, places, see_own, *_ = zip(*windows, strict=True)  # no lookahead: single tokens are evicted later
        window = QueryWindow(torch.cat(queries), torch.cat(places), all(see_own))
    whole = LazyObservation(
        partial(_vectors, parts),
        queries=torch.cat([part.queries for part in parts]),
        query_positions=torch.cat([part.query_positions for part in parts]),
        positions=padded([part.positions for part in parts], -1),
        seen=torch.cat([part.seen for part in parts]),
        phase=first.phase,
        params=first.params._replace(sinks=torch.cat(sinks) if sinks else None),
        window=window,
        slots=SlotInfo(
            ascending=all(one.ascending for one in slots),
            packed=same_length and all(one.packed for one in slots),
            whole=all(one.whole for one in slots),
            bias=biases([(part.slots.bias, part.positions) for part in parts]),
        ),
        sequences=SequenceInfo(
            first.sequences.last if len({one.last for one in sequences}) == 1 else None,
            *(tuple(chain.from_iterable(field)) for field in zip(*(one[1:] for one in sequences), strict=True)),
        ),
        memory={key: torch.cat([part.memory[key] for part in parts]) for key in first.memory},
        shared=first.shared,
    )
    rows = [part.known["rows", 1] for part in parts if ("rows", 1) in part.known]
    if len(rows) == len(parts):
        whole.known["rows", 1] = padded(rows, dim=-1)
    return whole


def key(step: Step) -> tuple[object, ...]:
    """Properties that steps must share to be rows of one batch."""
    seen, memory = step.observation, tuple((name, x.shape) for name, x in step.layer.memory.items())
    heads = seen.queries.shape[1::2], seen.keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.window is None else seen.window.queries.shape[2]
    params = *seen.params[:3], seen.params.sinks is None
    shared = id(seen.shared or None)
    return step.sequence.rule, memory, seen.phase, *heads, window, seen.keys.dtype, seen.keys.device, *params, shared


def numbers_of_a_slot(policy: Policy, query_heads: int, keys: List[int], values: List[int]) -> int:
    """Numbers that a slot takes in an eviction: attention of the window, and its key and value if the policy uses them.

    keys, values: their shapes [B,H_kv,T,D].
    """
    window, merges = policy.needs.window_decoding or 0, policy.merger.merges
    numbers = query_heads * max(1, window) + (keys[1] * keys[3] if window or merges else 0)
    return numbers + (values[1] * values[3] if policy.value is not None or merges else 0)


def batches(steps: List[Step]) -> Iterator[list[Step]]:
    """Splits steps of one `key` into batches of similar lengths that fit into the workspace."""
    if len(steps) == 1:
        yield list(steps)
        return
    lengths = [step.observation.positions.shape[2] for step in steps]
    rest = sorted(range(len(steps)), key=lambda index: -lengths[index])
    first, policy = steps[0].observation, steps[0].policy
    numbers = numbers_of_a_slot(policy, first.queries.shape[1], first.keys.shape, first.values.shape)
    space = WORKSPACE.get(first.keys.device.type, WORKSPACE_GPU) // (4 * numbers)
    while rest:
        longest = lengths[rest[0]]
        similar = [index for index in rest if lengths[index] >= PADDED * longest]
        found = sorted(similar[: max(1, space // longest)])
        yield [steps[index] for index in found]
        rest = [index for index in rest if index not in found]

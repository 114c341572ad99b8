"""Several layers' observations of one step as one: all their sequences, as rows of one batch; and which may be."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slots import biases, padded

WORKSPACE = {"cpu": 2**23}  # bytes of float32 rows and vectors that stand side by side at once: as a core's cache holds
LARGER = 2**26  # elsewhere, where launches cost more
FILLED = {"cpu": 2**14}  # scores that are filled up in less time than another round of launches takes
MORE = 2**20  # elsewhere
EVEN = 4  # layers of the same length that are enough to stand by themselves

FILL = {"keys": 0, "values": 0, "positions": -1}
"""Tensors with a slot dimension, and what shorter layers are filled up with."""
ROWS = ("queries", "query_positions", "seen")
"""Tensors with a row per sequence."""
WINDOW = ("recent_queries", "recent_positions", "sinks")
"""The same, where there are any."""
SAME = ("scaling", "phase", "softcap", "sliding_window", "aligned", "shared")
"""What all layers of a step have in common."""


class StackedObservation(Observation):
    """What n layers observed, with n * B sequences [n*B,...]; shorter layers end in empty slots.

    Keys, values and other tensors are put side by side when they are first read: few scores read all of them.
    """

    _parts: Sequence[Observation]

    def __init__(self, parts: Sequence[Observation]) -> None:
        first = parts[0]
        known: dict[str, Any] = {name: getattr(first, name) for name in SAME}
        known |= {name: all(getattr(part, name) for part in parts) for name in ("sighted", "ascending", "whole")}
        for name in WINDOW:
            known[name] = None if getattr(first, name) is None else _rows(name, parts)
        known["packed"] = all(part.packed for part in parts) and len({part.positions.shape[2] for part in parts}) == 1
        known["bias"] = biases([(part.bias, part.positions) for part in parts])
        known["last"] = first.last if len({part.last for part in parts}) == 1 else None
        known["opens"] = tuple(chain.from_iterable(part.opens for part in parts))
        for name in ("budgets", "prompts", "questions"):
            known[name] = tuple(chain.from_iterable(getattr(part, name) for part in parts))
        self.__dict__.update(known, _known={}, _parts=parts)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a tensor, or several by name
        """A tensor that is read for the first time."""
        if name == "layer":
            raise AttributeError("several layers are scored at once: a scorer that reads the layer says needs.layer")
        found: Any
        if name == "memory":
            found = {key: torch.cat([part.memory[key] for part in self._parts]) for key in self._parts[0].memory}
        elif name in FILL:
            found = padded([getattr(part, name) for part in self._parts], FILL[name])
        elif name in ROWS:
            found = _rows(name, self._parts)
        else:
            raise AttributeError(f"an observation has no {name}")
        self.__dict__[name] = found
        return found

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


def _rows(name: str, parts: Sequence[Observation]) -> Tensor:
    """A row per sequence; what is the same for all sequences of a layer (sinks) is repeated."""
    rows = [(getattr(part, name), len(part.positions)) for part in parts]
    return torch.cat([x if len(x) == n else x.expand(n, -1) for x, n in rows])


def kind(seen: Observation) -> tuple[object, ...]:
    """What observations of layers have in common that can be rows of one batch."""
    heads = seen.queries.shape[1::2], seen.keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.recent_queries is None else seen.recent_queries.shape[2]
    arithmetic = seen.scaling, seen.softcap, seen.sliding_window, seen.sinks is None
    return seen.phase, *heads, window, seen.keys.dtype, seen.keys.device, *arithmetic, id(seen.shared or None)


def batches(layers: Sequence[Observation], policy: Policy) -> Iterator[list[int]]:
    """Which layers, all of one `kind`, are rows of a batch: as many at once as the workspace holds.

    Layers of one length need no masks; those of rare lengths are filled up to a longer one where that is little.
    """
    if len(layers) == 1:
        yield [0]
        return
    lengths: dict[int, list[int]] = {}
    for index, seen in enumerate(layers):
        lengths.setdefault(seen.positions.shape[2], []).append(index)
    device, heads = layers[0].keys.device.type, layers[0].positions[..., 0].numel()
    filled = FILLED.get(device, MORE) // heads
    rare: list[int] = []
    longest = added = 0
    for length in sorted(lengths, reverse=True):
        some = lengths[length]
        if len(some) >= EVEN:
            yield from _cut(some, policy, layers, even=True)
            continue
        added += len(some) * (longest - length) if rare else 0
        if rare and 4 * length < 3 * longest and added > filled:
            yield from _cut(rare, policy, layers, even=False)
            rare, added = [], 0
        longest = longest if rare else length
        rare += some
    if rare:
        yield from _cut(rare, policy, layers, even=False)


def _cut(rows: list[int], policy: Policy, layers: Sequence[Observation], even: bool) -> Iterator[list[int]]:
    """As many rows at a time as the workspace holds.

    A slot takes keys and values where they are read, and attention rows of the window; layers of different lengths look
    through their windows one after the other.
    """
    first = layers[rows[0]]
    batch, query_heads, _, dim = first.queries.shape
    _, heads, _, value_dim = first.values.shape
    window, merges = policy.needs.queries_decoding if even else 0, policy.merger.merges
    numbers = query_heads * max(1, window) + (heads * dim if window or merges else 0)
    numbers += heads * value_dim if policy.value is not None or merges else 0
    space = WORKSPACE.get(first.keys.device.type, LARGER)
    most = max(1, space // (4 * batch * numbers) // first.positions.shape[2])
    yield from (rows[begin : begin + most] for begin in range(0, len(rows), most))

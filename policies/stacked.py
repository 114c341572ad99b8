"""Combines the observations of several layers in one step, so that they are scored together: rows of one batch."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvbench.policies.observation import Observation, QueryWindow, SequenceInfo, SlotInfo
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slots import biases, padded

WORKSPACE = {"cpu": 2**23}  # bytes of float32 rows and vectors in memory at once: the cache of a core
WORKSPACE_GPU = 2**26  # more, because each launch costs time
PADDED = 0.75  # layers are padded to the longest one if they have at least this share of its slots


class LazyObservation(Observation):
    """An observation whose keys and values are made on first use, because few scorers use both.

    load: makes them, by name. layer is missing if it combines several layers.
    """

    def __init__(self, load: Mapping[str, Callable[[], Tensor]], **fields: Any) -> None:  # noqa: ANN401
        self.__dict__.update({"known": {}, "memory": {}, "shared": {}, "_load": load}, **fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Called for a field that was not made yet."""
        if name == "layer":
            raise AttributeError("several layers are scored at once: a scorer that uses the layer needs needs.layer")
        if name not in self.__dict__.get("_load", {}):
            raise AttributeError(f"an observation has no {name}")
        found = self.__dict__[name] = self._load[name]()
        return found


def stacked(parts: Sequence[Observation]) -> Observation:
    """The observations of n layers as one of n * B sequences; shorter layers are padded with empty slots."""
    if len(parts) == 1:
        return parts[0]
    first, slots, sequences = parts[0], [part.slots for part in parts], [part.sequences for part in parts]
    same_length = len({part.positions.shape[2] for part in parts}) == 1
    sinks = [part.params.sinks.expand(len(part.seen), -1) for part in parts if part.params.sinks is not None]
    windows, window = [part.window for part in parts if part.window is not None], None
    if windows:
        queries, places, see_own = zip(*windows, strict=True)
        window = QueryWindow(torch.cat(queries), torch.cat(places), all(see_own))
    whole = LazyObservation(
        {"keys": lambda: padded([part.keys for part in parts]), "values": lambda: padded([x.values for x in parts])},
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
            first.sequences.aligned,
            first.sequences.last if len({one.last for one in sequences}) == 1 else None,
            *(tuple(chain.from_iterable(field)) for field in zip(*(one[2:] for one in sequences), strict=True)),
        ),
        memory={key: torch.cat([part.memory[key] for part in parts]) for key in first.memory},
        shared=first.shared,
    )
    rows = [part.known["rows", 1] for part in parts if ("rows", 1) in part.known]
    if len(rows) == len(parts):
        whole.known["rows", 1] = padded(rows, dim=-1)
    return whole


def kind(seen: Observation) -> tuple[object, ...]:
    """Properties that observations must share to be stacked."""
    heads = seen.queries.shape[1::2], seen.keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.window is None else seen.window.queries.shape[2]
    params = *seen.params[:3], seen.params.sinks is None
    return seen.phase, *heads, window, seen.keys.dtype, seen.keys.device, *params, id(seen.shared or None)


def batches(layers: Sequence[Observation], policy: Policy) -> list[list[int]]:
    """Splits layers of one `kind` into batches of similar lengths that fit into the workspace, by index.

    A slot takes memory for its key and value, if the policy uses them, and for the attention rows of the window.
    """
    if len(layers) == 1:
        return [[0]]
    lengths = [seen.positions.shape[2] for seen in layers]
    rest, found = sorted(range(len(layers)), key=lambda index: -lengths[index]), []
    first = layers[0]
    batch, query_heads, _, dim = first.queries.shape
    _, heads, _, value_dim = first.values.shape
    window, merges = policy.needs.window_decoding or 0, policy.merger.merges
    numbers = query_heads * max(1, window) + (heads * dim if window or merges else 0)
    numbers += heads * value_dim if policy.value is not None or merges else 0
    space = WORKSPACE.get(first.keys.device.type, WORKSPACE_GPU) // (4 * batch * numbers)
    while rest:
        longest = lengths[rest[0]]
        similar = [index for index in rest if lengths[index] >= PADDED * longest]
        found.append(sorted(similar[: max(1, space // longest)]))
        rest = [index for index in rest if index not in found[-1]]
    return found

"""Combines the observations of several layers in one step, so that they are scored together: rows of one batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """An observation whose tensors are made on first use, because few scorers use all of them.

    load: makes the missing fields, by name. layer is missing if it combines several layers.
    """

    def __init__(self, load: Mapping[str, Callable[[], Any]], **fields: Any) -> None:  # noqa: ANN401
        rest = {name: {} for name in ("known", "memory", "shared") if name not in load}
        self.__dict__.update(rest, _load=load, **fields)

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
    whole = LazyObservation(
        {
            "queries": lambda: torch.cat([part.queries for part in parts]),
            "query_positions": lambda: torch.cat([part.query_positions for part in parts]),
            "seen": lambda: torch.cat([part.seen for part in parts]),
            "keys": lambda: padded([part.keys for part in parts]),
            "values": lambda: padded([part.values for part in parts]),
            "positions": lambda: padded([part.positions for part in parts], -1),
            "memory": lambda: {key: torch.cat([part.memory[key] for part in parts]) for key in first.memory},
        },
        phase=first.phase,
        params=first.params._replace(sinks=_sinks(parts)),
        window=None if first.window is None else _window([part.window for part in parts if part.window is not None]),
        slots=SlotInfo(
            ascending=all(one.ascending for one in slots),
            packed=same_length and all(one.packed for one in slots),
            whole=all(one.whole for one in slots),
            bias=biases([(part.slots.bias, part.positions) for part in parts]),
        ),
        sequences=SequenceInfo(
            aligned=first.sequences.aligned,
            last=first.sequences.last if len({one.last for one in sequences}) == 1 else None,
            opens=tuple(chain.from_iterable(one.opens for one in sequences)),
            budgets=tuple(chain.from_iterable(one.budgets for one in sequences)),
            prompts=tuple(chain.from_iterable(one.prompts for one in sequences)),
            questions=tuple(chain.from_iterable(one.questions for one in sequences)),
        ),
        shared=first.shared,
    )
    rows = [part.known["rows", 1] for part in parts if ("rows", 1) in part.known]
    if len(rows) == len(parts):
        whole.known["rows", 1] = padded(rows, dim=-1)
    return whole


def _sinks(parts: Sequence[Observation]) -> Tensor | None:
    """[n*B,H_q] logits of attention sinks, with a row for each sequence; None if no layer has sinks."""
    sinks = [(part.params.sinks, len(part.positions)) for part in parts]
    rows = [x.expand(size, -1) for x, size in sinks if x is not None]
    return torch.cat(rows) if rows else None


def _window(windows: Sequence[QueryWindow]) -> QueryWindow:
    queries, positions, see_own = zip(*windows, strict=True)
    return QueryWindow(torch.cat(queries), torch.cat(positions), all(see_own))


def kind(seen: Observation) -> tuple[object, ...]:
    """Properties that observations must share to be stacked."""
    heads = seen.queries.shape[1::2], seen.keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.window is None else seen.window.queries.shape[2]
    params = *seen.params[:3], seen.params.sinks is None
    return seen.phase, *heads, window, seen.keys.dtype, seen.keys.device, *params, id(seen.shared or None)


def batches(layers: Sequence[Observation], policy: Policy) -> Iterator[list[int]]:
    """Splits layers of one `kind` into batches of similar lengths that fit into the workspace, by index.

    A slot takes memory for its key and value, if the policy uses them, and for the attention rows of the window.
    """
    if len(layers) == 1:
        yield [0]
        return
    lengths = [seen.positions.shape[2] for seen in layers]
    rest = sorted(range(len(layers)), key=lambda index: -lengths[index])
    first = layers[0]
    batch, query_heads, _, dim = first.queries.shape
    _, heads, _, value_dim = first.values.shape
    window, merges = policy.needs.queries_decoding, policy.merger.merges
    numbers = query_heads * max(1, window) + (heads * dim if window or merges else 0)
    numbers += heads * value_dim if policy.value is not None or merges else 0
    space = WORKSPACE.get(first.keys.device.type, WORKSPACE_GPU) // (4 * batch * numbers)
    while rest:
        longest = lengths[rest[0]]
        similar = [index for index in rest if lengths[index] >= PADDED * longest]
        some = sorted(similar[: max(1, space // longest)])
        yield some
        rest = [index for index in rest if index not in some]

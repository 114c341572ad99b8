"""Several layers' observations of one step as one: all their sequences, as rows of one batch."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvbench.policies.observation import Observation
from kvbench.policies.stores.slots import biases, padded

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

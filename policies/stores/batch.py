"""Sequences that decode as one batch, each over its own number of slots: the rows of a sweep in one layer.

Those of one length are a dense layer, whose tensors are views of flat ones. So a token enters all of them in one
operation, and everything else sees dense layers.

Shapes: B sequences of all lengths, H KV heads, C slots of a length, N slots of all, D head dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from itertools import accumulate, groupby

import torch
from torch import Tensor

from kvbench.kernels.references import append
from kvbench.policies.stores.combined import CombinedStore
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.store import LayerStore


class BatchStore(CombinedStore):
    """Dense layers of one `shape` as one: all at their size, or all with the same room to grow."""

    evicted = True
    by_length: Sequence[tuple[slice, DenseStore]]

    def __init__(self, layers: Sequence[DenseStore]) -> None:
        """The sequences of all layers, in this order; neighbours of one length become a part."""
        alike = groupby(layers, key=lambda layer: (layer.used, layer.capacity))
        self._lay_out([list(group) for _, group in alike])

    def _lay_out(self, groups: Sequence[Sequence[DenseStore]], room: Sequence[int] | None = None) -> None:
        """Copy layers, in groups of one length, into flat tensors; room: slots that each group gets in addition."""
        first = groups[0][0]
        heads, device = first.buffers["keys"].shape[1], first.buffers["keys"].device
        rows = [sum(layer.buffers["keys"].shape[0] for layer in group) for group in groups]
        lengths = [group[0].capacity + more for group, more in zip(groups, room or [0] * len(groups), strict=True)]
        ends = list(accumulate(n * heads * length for n, length in zip(rows, lengths, strict=True)))
        flat = {name: x.new_empty(ends[-1], *x.shape[3:]) for name, x in first.buffers.items()}
        parts, bases = [], []
        for group, n, length, begin, end in zip(groups, rows, lengths, [0, *ends], ends, strict=False):
            views = {name: x[begin:end].view(n, heads, length, *x.shape[1:]) for name, x in flat.items()}
            parts.append(_stacked(group, views))
            bases.append(torch.arange(begin, end, length, device=device).view(n, heads, 1))
        self._hold(flat, parts, torch.cat(bases))

    def _hold(self, flat: dict[str, Tensor], parts: Sequence[DenseStore], bases: Tensor) -> None:
        """parts: views of `flat`; bases [B,H,1]: where in it the slots of every head begin."""
        self._flat, self._bases = flat, bases
        ends = list(accumulate(part.buffers["keys"].shape[0] for part in parts))
        self.by_length = [(slice(begin, end), part) for begin, end, part in zip([0, *ends], ends, parts, strict=False)]
        used = [bases.new_full((rows.stop - rows.start, *bases.shape[1:]), part.used) for rows, part in self.by_length]
        self._used = torch.cat(used)  # [B,H,1] slots in use
        self._bytes = sum(buffer.nbytes for part in parts for buffer in part.buffers.values())

    @property
    def members(self) -> Sequence[DenseStore]:
        return [part for _, part in self.by_length]

    @property
    def nbytes(self) -> int:
        return self._bytes if self.by_length[0][1].free is None else self._bytes + self._bases.nbytes

    @property
    def shape(self) -> Hashable:
        return self.by_length[0][1].shape

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        assert keys.shape[2] == 1, "rows take one token each"
        assert not absent, "rows take one token each"
        slots = self._enter()  # which may move everything
        tokens = {"keys": keys, "values": values, "positions": positions[:, None].expand(-1, keys.shape[1], -1)}
        append(self._flat, tokens, self._bases[..., 0], slots[..., 0])
        for _, part in self.by_length:
            part.filled()

    def _enter(self) -> Tensor:
        """Slots [B,H,1] of the next token: those that are free, or else the ones behind all others."""
        free = [part.free for part in self.members if part.free is not None]
        if free:
            return torch.cat(free)
        first = self.members[0]
        if first.used == first.capacity:
            self._lay_out([[part] for part in self.members], [part.growth() for part in self.members])
        self._used += 1
        return self._used - 1

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        raise AssertionError("sequences at their budget evict one token each")

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "biases are written before sequences decode together"
        for rows, part in self.by_length:
            part.write(slots[rows], keys[rows], values[rows])

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        assert rows is None, "sequences at their budget evict one token each"
        for own, part in self.by_length:
            part.release(slots[own], None)

    def each(self) -> list[DenseStore]:
        """Every sequence by itself, in the same memory."""
        return [row for _, part in self.by_length for row in part.each()]

    def picked(self, rows: Sequence[int]) -> LayerStore:
        """Some of the sequences, rising: views, until more than half of the memory would be idle."""
        chosen = []
        for own, part in self.by_length:
            staying = [row - own.start for row in rows if own.start <= row < own.stop]
            if staying:
                chosen += [part.picked(run) for run in _runs(staying)]
        if len(rows) == 1:
            return chosen[0]
        if 2 * sum(part.buffers["positions"].numel() for part in chosen) < len(self._flat["positions"]):
            return BatchStore(chosen)
        found = copy(self)
        found._hold(self._flat, chosen, self._bases[list(rows)])
        return found


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Rising numbers as slices."""
    begins = [row for place, row in enumerate(rows) if place == 0 or rows[place - 1] != row - 1]
    ends = [row + 1 for place, row in enumerate(rows) if place == len(rows) - 1 or rows[place + 1] != row + 1]
    return map(slice, begins, ends)


def _stacked(layers: Sequence[DenseStore], into: dict[str, Tensor]) -> DenseStore:
    """The sequences of layers of one length and shape, copied into buffers [B,H,C,...] with the same room or more."""
    counts = [len(layer.positions) for layer in layers]  # asked for, they also tell which slots are free
    for name, buffer in into.items():
        buffer[:, :, layers[0].capacity :] = -1 if name == "positions" else 0
        for layer, rows in zip(layers, buffer.split(counts), strict=True):
            rows[:, :, : layer.capacity] = layer.buffers[name]
    free = [layer.free for layer in layers if layer.free is not None]
    return layers[0].copied(into, torch.cat(free) if free else None, all(layer.ascending for layer in layers))

"""Stores whose groups span a whole sequence: every sequence of a batch in a store of its own.

Shapes: B sequences, H KV heads, C slots of the longest sequence, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation
from kvbench.policies.stores.combined import CombinedStore
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import LayerStore

Open = Callable[[Tensor, Tensor, tuple[str, ...], int], LayerStore]


def open_per_sequence(
    open_one: Open, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int
) -> LayerStore:
    """One store per sequence, opened by `open_one`; without a wrapper where there is one sequence only."""
    rows = [open_one(keys[b : b + 1], values[b : b + 1], statistics, width) for b in range(keys.shape[0])]
    return rows[0] if len(rows) == 1 else PerSequenceStores(rows)


class PerSequenceStores(CombinedStore):
    """The stores of a batch's sequences, each of which comes out as it would alone; views are padded."""

    def __init__(self, rows: Sequence[LayerStore]) -> None:
        self.rows = list(rows)

    @property
    def members(self) -> Sequence[LayerStore]:
        return self.rows

    @property
    def evicted(self) -> bool:
        return any(row.evicted for row in self.rows)

    @evicted.setter
    def evicted(self, evicted: bool) -> None:
        for row in self.rows:
            row.evicted = evicted

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        for b, row in enumerate(self.rows):
            here = slice(b, b + 1)
            own_keys, own_values, own_positions = keys[here], values[here], positions[here]
            if absent:
                real = (positions[b] >= 0).nonzero()[:, 0]
                own_keys, own_values, own_positions = (
                    own_keys[:, :, real],
                    own_values[:, :, real],
                    own_positions[:, real],
                )
            if own_positions.shape[1]:
                row.append(own_keys, own_values, own_positions, absent=False)

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        kept = []
        for b, row in enumerate(self.rows):
            own = mask[b : b + 1, :, : row.positions.shape[2]]
            kept.append(row.keep(own, spare, None if counts is None else counts[b : b + 1]))
        return padded(kept)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        for b, row in enumerate(self.rows):
            # Slots named beyond a shorter sequence's own are padding of `keep`'s and `positions`' making.
            real = (slots[b] < row.positions.shape[2]).all(0).nonzero()[:, 0]
            here = slice(b, b + 1)
            row.write(slots[here][:, :, real], keys[here][:, :, real], values[here][:, :, real])

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        for b, row in enumerate(self.rows):
            if rows is None or rows[b]:
                row.release(slots[b : b + 1], None)

    def settle(self) -> None:
        for row in self.rows:
            row.settle()

    @property
    def watching(self) -> bool:
        return any(row.watching for row in self.rows)

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:
        for b, row in enumerate(self.rows):
            if row.watching and bool((observation.query_positions[b] >= 0).any()):
                row.observe(one_sequence(observation, b, row.positions.shape[2]), prompts[b : b + 1])

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        outputs = []
        for b, row in enumerate(self.rows):
            output = row.attend(queries[b : b + 1], positions[b : b + 1], how)
            if output is None:
                return None
            outputs.append(output)
        return torch.cat(outputs)


def one_sequence(observation: Observation, b: int, slots: int) -> Observation:
    """What sequence b of an observation shows of its first `slots` slots."""
    here = slice(b, b + 1)
    return replace(
        observation,
        queries=observation.queries[here],
        query_positions=observation.query_positions[here],
        keys=observation.keys[here, :, :slots],
        values=observation.values[here, :, :slots],
        positions=observation.positions[here, :, :slots],
        seen=observation.seen[here],
        recent_queries=None,
        recent_positions=None,
    )

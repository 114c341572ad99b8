"""Stores whose groups span a whole sequence: every sequence of a batch in a store of its own.

Shapes: B sequences, H KV heads, C slots of the longest sequence, D head dim.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.policies.contents import saved
from kvbench.policies.observation import Arithmetic, Observation, State
from kvbench.policies.stores.dense import padded
from kvbench.policies.stores.store import Held

Open = Callable[[Tensor, Tensor, tuple[str, ...], int], Held]


def open_apart(open_one: Open, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> Held:
    """One store per sequence, opened by `open_one`; without a wrapper where there is one sequence only."""
    rows = [open_one(keys[b : b + 1], values[b : b + 1], statistics, width) for b in range(keys.shape[0])]
    return rows[0] if len(rows) == 1 else Apart(rows)


@saved
class Apart(Held):
    """The stores of a batch's sequences, each of which comes out as it would alone; views are padded."""

    def __init__(self, rows: Sequence[Held]) -> None:
        self.rows = list(rows)

    @property
    def keys(self) -> Tensor:
        return padded([row.keys for row in self.rows])

    @property
    def values(self) -> Tensor:
        return padded([row.values for row in self.rows])

    @property
    def positions(self) -> Tensor:
        return padded([row.positions for row in self.rows], fill=-1)

    @property
    def state(self) -> State:
        states = [row.state for row in self.rows]
        return {name: padded([state[name] for state in states]) for name in states[0]}

    def remember(self, state: State) -> None:
        for b, row in enumerate(self.rows):
            own = row.state
            for name, x in own.items():
                x.copy_(state[name][b : b + 1, :, : x.shape[2]])
            row.remember(own)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def evicted(self) -> bool:
        return any(row.evicted for row in self.rows)

    @evicted.setter
    def evicted(self, evicted: bool) -> None:
        for row in self.rows:
            row.evicted = evicted

    @property
    def spare_nbytes(self) -> int:
        return sum(row.spare_nbytes for row in self.rows)

    def expect(self, tokens: int) -> None:
        for row in self.rows:
            row.expect(tokens)

    def parts(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for row in self.rows:
            sizes.update(row.parts())
        return dict(sizes)

    @property
    def packed(self) -> bool:
        return all(row.packed for row in self.rows) and len({row.positions.shape[2] for row in self.rows}) == 1

    @property
    def ascending(self) -> bool:
        return all(row.ascending for row in self.rows)

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

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
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

    def attend(self, queries: Tensor, positions: Tensor, how: Arithmetic) -> Tensor | None:
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

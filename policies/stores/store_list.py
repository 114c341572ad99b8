"""Stores of single sequences, or of single KV heads, as one store.

Shapes: B sequences, H KV heads, C slots of the longest sequence, D head dim.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation, State
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import LayerStore


class StoreList(LayerStore):
    """One store per sequence. The views are copies, in which shorter sequences end in empty slots."""

    def __init__(self, members: Sequence[LayerStore]) -> None:
        self.members = list(members)

    def _each(self) -> list[tuple[slice, LayerStore]]:
        """Each sequence as a slice of the batch, and its store."""
        return [(slice(row, row + 1), held) for row, held in enumerate(self.members)]

    # --- views -----------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return padded([held.keys for held in self.members])

    @property
    def values(self) -> Tensor:
        return padded([held.values for held in self.members])

    @property
    def positions(self) -> Tensor:
        return padded([held.positions for held in self.members], fill=-1)

    @property
    def state(self) -> State:
        states = [held.state for held in self.members]
        return {name: padded([state[name] for state in states]) for name in states[0]}

    def remember(self, state: State) -> None:
        for row, held in self._each():
            for name, x in held.state.items():
                x.copy_(state[name][row, :, : x.shape[2]])

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.members)

    @property
    def spare_nbytes(self) -> int:
        return sum(held.spare_nbytes for held in self.members)

    def parts(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for held in self.members:
            sizes.update(held.parts())
        return dict(sizes)

    def expect(self, tokens: int) -> None:
        for held in self.members:
            held.expect(tokens)

    @property
    def evicted(self) -> bool:  # type: ignore[override]
        return any(held.evicted for held in self.members)

    @property
    def packed(self) -> bool:
        members = self.members
        return all(held.packed for held in members) and len({held.positions.shape[2] for held in members}) == 1

    @property
    def ascending(self) -> bool:
        return all(held.ascending for held in self.members)

    # --- tokens ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        for row, held in self._each():
            own = keys[row], values[row], positions[row]
            if absent:
                real = (own[2][0] >= 0).nonzero()[:, 0]
                own = own[0][:, :, real], own[1][:, :, real], own[2][:, real]
            if own[2].shape[1]:
                held.append(*own, absent=False)

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        return padded(
            [
                held.keep(mask[row, :, : held.positions.shape[2]], spare, None if counts is None else counts[row])
                for row, held in self._each()
            ]
        )

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        for row, held in self._each():
            real = (slots[row] < held.positions.shape[2]).flatten(0, 1).all(0).nonzero()[:, 0]  # others are padding
            held.write(*(x[row, :, real] for x in (slots, keys, values)))

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        for row, held in self._each():
            if rows is None or rows[row.start]:
                held.release(slots[row], None)

    def settle(self) -> None:
        for held in self.members:
            held.settle()

    @property
    def watching(self) -> bool:  # type: ignore[override]
        return any(held.watching for held in self.members)

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:
        seen = observation
        for row, held in self._each():
            if held.watching and bool((seen.query_positions[row] >= 0).any()):
                count, names = held.positions.shape[2], ("keys", "values", "positions")
                own = {name: getattr(seen, name)[row, :, :count] for name in names}
                own |= {name: getattr(seen, name)[row] for name in ("queries", "query_positions", "seen")}
                held.observe(replace(seen, **own, window=None, known={}), prompts[row])

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        outputs = []
        for row, held in self._each():
            output = held.attend(queries[row], positions[row], how)
            if output is None:
                return None
            outputs.append(output)
        return torch.cat(outputs)


class HeadList(StoreList):
    """One store per KV head of a single sequence, after its prompt was evicted: the sequences of the base class."""

    @property
    def keys(self) -> Tensor:
        return super().keys.transpose(0, 1)

    @property
    def values(self) -> Tensor:
        return super().values.transpose(0, 1)

    @property
    def positions(self) -> Tensor:
        return super().positions.transpose(0, 1)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        places = positions.expand(len(self.members), -1)
        super().append(keys.transpose(0, 1), values.transpose(0, 1), places, absent)

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        own = [how] * len(self.members)
        if how.sinks is not None:
            own = [how._replace(sinks=sinks) for sinks in how.sinks.chunk(len(own), dim=1)]
        groups = zip(self.members, queries.chunk(len(own), dim=1), own, strict=True)
        outputs = [held.attend(rows, positions, params) for held, rows, params in groups]
        found = [output for output in outputs if output is not None]
        return torch.cat(found, dim=1) if len(found) == len(outputs) else None

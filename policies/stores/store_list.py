"""Stores of single sequences, or of single KV heads, as one store.

Shapes: B sequences, H KV heads, C slots of the longest sequence, D head dim.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation, SlotInfo, State
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import CompressedStore, Sizes


class StoreList(CompressedStore):
    """One store per sequence. The views are copies, in which shorter sequences end in empty slots."""

    def __init__(self, members: Sequence[CompressedStore]) -> None:
        self.members = list(members)

    def _each(self) -> list[tuple[slice, CompressedStore]]:
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

    @state.setter
    def state(self, state: State) -> None:
        for row, held in self._each():
            for name, x in held.state.items():
                x.copy_(state[name][row, :, : x.shape[2]])

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.members)

    def sizes(self) -> Sizes:
        sizes = [held.sizes() for held in self.members]
        kinds: Counter[str] = Counter()
        for one in sizes:
            kinds.update(one.kinds)
        return Sizes(dict(kinds), sum(one.spare for one in sizes))

    def expect(self, tokens: int) -> None:
        for held in self.members:
            held.expect(tokens)

    @property
    def slots(self) -> SlotInfo:
        slots, lengths = [held.slots for held in self.members], {held.positions.shape[2] for held in self.members}
        return SlotInfo(all(one.ascending for one in slots), all(one.packed for one in slots) and len(lengths) == 1)

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
    def watching(self) -> bool:
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

"""The ragged store: every KV head holds its own number of tokens, and only their bytes.

Shapes: B sequences, H KV heads, C slots of the longest segment, N slots of all segments, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention_flat
from kvbench.policies.observation import AttentionParams, SlotInfo, State
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore, Store


@dataclass(frozen=True)
class Ragged(Store):
    """Keys and values as the model made them; every KV head of every sequence holds only its own tokens."""

    exact = True
    replayable = True

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return RaggedLayer(keys, values, statistics, width)


class RaggedLayer(SlotStore):
    """Segments of equal length until the first eviction; then flat tensors [N,...], and the `starts` and `counts` of
    the segments. Views are copies then, in which shorter segments end in empty slots.
    """

    def _view(self, name: str) -> Tensor:
        if self.starts is None:
            return super()._view(name)
        slots, taken = self._flat_slots()
        copied = self.memory[name][slots]
        return copied.masked_fill_(
            ~taken.view(*taken.shape, *[1] * (copied.dim() - 3)), -1 if name == "positions" else 0
        )

    def _flat_slots(self) -> tuple[Tensor, Tensor]:
        """The flat slot of each segment's slots, [B,H,C], and which of them are in use."""
        assert self.starts is not None
        assert self.counts is not None
        steps = torch.arange(self.used, device=self.starts.device)
        taken = steps < self.counts[..., None]
        return (self.starts[..., None] + steps).masked_fill(~taken, 0), taken

    @property
    def positions(self) -> Tensor:
        return super().positions if self.starts is None else self._view("positions")

    @property
    def slots(self) -> SlotInfo:
        return super().slots if self.starts is None else super().slots._replace(packed=False)

    @property
    def state(self) -> State:
        return super().state

    @state.setter
    def state(self, state: State) -> None:
        if self.starts is not None:
            slots, taken = self._flat_slots()
            for name, x in state.items():
                self.memory[name][slots[taken]] = x[taken]

    @property
    def nbytes(self) -> int:
        if self.starts is None or self.counts is None:
            return super().nbytes
        return sum(x.nbytes for x in (*self.memory.values(), self.starts, self.counts))

    @property
    def capacity(self) -> int:
        return super().capacity if self.starts is None else len(self.first)

    # --- in a table ------------------------------------------------------------------------------------------------
    def grown(self, used: int, taken: int, free: Tensor | None, counts: Tensor | None) -> None:
        super().grown(used, taken, free, counts)
        self.counts = counts

    def with_memory(self, memory: dict[str, Tensor], free: Tensor | None, counts: Tensor | None = None) -> Self:
        held = super().with_memory(memory, free)
        held.counts = self.counts if counts is None else counts
        return held

    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.starts is None or self.counts is None:
            return super().segments()
        return self.starts, self.counts, self.counts if self.free is None else self.free[..., 0]

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if keys.shape[2] > 1:
            self._even_out()
        super().append(keys, values, positions)

    def _write_at_end(self, tokens: dict[str, Tensor], new: int) -> None:
        if self.counts is None:
            super()._write_at_end(tokens, new)
            return
        self.reserve()
        self._put(self.counts[..., None], tokens)
        self.counts = self.counts + 1
        self.use(self.used + 1, self.room - 1)

    def _put(self, slots: Tensor, tokens: Mapping[str, Tensor], all_names: bool = True) -> None:
        if self.starts is None:
            super()._put(slots, tokens, all_names)
            return
        for name, x in self.memory.items():
            if name in tokens or all_names:
                x[self.starts[..., None] + slots] = tokens.get(name, 0.0)

    def _lengthen(self, more: int, tokens: Mapping[str, Tensor]) -> None:
        if self.counts is None:
            super()._lengthen(more, tokens)
        else:
            self._flatten(self.contents(), self.counts, more)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if bias is not None:
            self._even_out()
        super().write(slots, keys, values, bias)

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self._even_out()
        if mask.is_meta:
            return super().keep(mask, spare, count)
        slots = super().keep(mask, 0, count)
        self._flatten(self.contents(), (self.positions >= 0).sum(-1), spare)
        return slots

    def _flatten(self, padded: Mapping[str, Tensor], counts: Tensor, spare: int) -> None:
        """Store the first counts [B,H] slots of padded tensors [B,H,C,...] in segments with `spare` more slots each."""
        ends = (counts + spare).flatten().cumsum(0)
        self.starts, self.counts = ends.view_as(counts) - counts - spare, counts.clone()
        self.used, self.room, self.free = padded["positions"].shape[2], spare, None
        self._packed = True  # each segment by itself
        into, taken = self._flat_slots()
        for name, x in padded.items():
            flat = x.new_full((int(ends[-1]), *x.shape[3:]), -1 if name == "positions" else 0)
            flat[into[taken]] = x[taken]
            self.memory[name] = flat

    def _even_out(self) -> None:
        """Turn flat memory into tensors [B,H,C,...] again, padded to the longest segment."""
        if self.starts is not None:
            self.memory, self.starts, self.counts = self.contents(), None, None
            self.free, self.room, self._expected = None, 0, None
            self._packed = bool((self.memory["positions"] >= 0).all())

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self.starts is None or self.counts is None or queries.shape[2] > 1:
            return None
        stored = self.memory["keys"], self.memory["values"], positions, self.memory["positions"]
        call = queries, *stored, self.starts, self.counts, self.used
        return decode_attention_flat(*call, *how.for_kernels, bias=self.memory.get("bias")).out

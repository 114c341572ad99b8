"""The memory of a slot store: segments of slots, and what is known about them.

Shapes: B sequences, H KV heads, C slots of a segment, N slots of all segments, D head dim.
"""

from copy import copy
from typing import Self

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.observation import SlotInfo, State
from kvbench.policies.stores.slots import first_positions, flat_slots
from kvbench.policies.stores.store import LayerStore, Sizes


class SlotMemory(LayerStore):
    """Segments of which the first `used` slots are in use; `memory`: keys, values, positions and statistics by name.

    starts, counts [B,H]: the start of each segment and its slots in use, for flat memory only. free [B,H,1]: the only
    empty slot of every KV head, if each has exactly one. room: slots after those in use. lent: keys and values are the
    model's own tensors, which other caches may hold too. Memory without positions has its i-th token at position i.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int, ragged: bool = False
    ) -> None:
        rows, device, wide = keys.shape[:2], keys.device, widen(keys.new_empty(0)).dtype
        self.memory: dict[str, Tensor] = {
            "keys": keys.new_empty(*rows, 0, keys.shape[-1]),
            "values": values.new_empty(*rows, 0, values.shape[-1]),
            "positions": torch.full((*rows, 0), -1, dtype=torch.int32, device=device),
            **{name: torch.zeros(*rows, 0, width, dtype=wide, device=device) for name in statistics},
        }
        self._statistics, self._ragged = statistics, ragged
        self.starts: Tensor | None = None
        self.counts: Tensor | None = None
        self.free: Tensor | None = None
        self.used = self.room = 0
        self.lent = False
        self._views: dict[str, Tensor] = {}
        self._bytes: int | None = None  # of the memory, if it was computed
        self._expected: int | None = None  # tokens to come without reserved slots, if their number is known
        self._packed = self._ascending = True
        self._whole = True  # until several tokens are evicted at once
        self._marked = True  # the free slots have position -1, which is written when positions are read

    @classmethod
    def of(cls, contents: State, statistics: tuple[str, ...], ascending: bool, packed: bool | None = None) -> Self:
        """A layer with `contents` [B,H,C,...], which may have empty slots. packed: whether none is empty, if known."""
        held = cls(contents["keys"], contents["values"], statistics, width=0)
        held.memory, held.used = contents, contents["positions"].shape[2]
        held._packed = bool((contents["positions"] >= 0).all()) if packed is None else packed
        held._ascending = ascending
        return held

    def _view(self, name: str) -> Tensor:
        """[B,H,used,...]: a view, which is stored because a layer at its budget reads it in every step.

        For flat memory a copy, in which shorter segments end in empty slots (position -1, else 0).
        """
        if self.starts is not None:
            slots, taken = self._flat_slots()
            fill = -1 if name == "positions" else 0
            copied = self.memory[name][slots]
            return copied.masked_fill_(~taken.view(*taken.shape, *[1] * (copied.dim() - 3)), fill)
        if name not in self._views:
            self._views[name] = self.memory[name].narrow(2, 0, self.used)
        return self._views[name]

    def _flat_slots(self) -> tuple[Tensor, Tensor]:
        """The flat slot of each segment's slots, [B,H,used], and which of them are in use."""
        assert self.starts is not None
        assert self.counts is not None
        return flat_slots(self.starts, self.counts, self.used)

    def contents(self) -> dict[str, Tensor]:
        """All slots in use by name, [B,H,C,...]."""
        return {name: self._view(name) for name in self.memory} | {"positions": self.positions}

    def _store_positions(self) -> None:
        """Store the positions of memory without them, before a token is evicted or missing."""
        if "positions" not in self.memory:
            self._hold("positions", self.slot_positions().contiguous())

    def slot_positions(self) -> Tensor:
        """Positions of all slots, in the shape of the memory; -1 in empty and spare ones."""
        if "positions" in self.memory:
            self.positions  # noqa: B018 - writes those of free slots
            return self.memory["positions"]
        return first_positions(self.first.shape[:3], self.used, self.first.device)

    @property
    def token_memory(self) -> dict[str, Tensor]:
        """The tensors that hold keys and values; the others are positions, statistics and a bias."""
        return {name: self.memory[name] for name in ("keys", "values")}

    @property
    def step_format(self) -> tuple[object, ...] | None:
        """Layers of equal formats take their decoding steps in one batch on a GPU; None: this one cannot."""
        dims = self.memory["keys"].shape[-1], self.memory["values"].shape[-1]
        return None if "bias" in self.memory else ("dense", *dims)

    @property
    def keys(self) -> Tensor:
        return self._view("keys")

    @property
    def values(self) -> Tensor:
        return self._view("values")

    @property
    def positions(self) -> Tensor:
        if "positions" not in self.memory:
            return first_positions((*self.first.shape[:2], self.used), self.used, self.first.device)
        positions = self._view("positions")
        if not self._marked and self.free is not None:
            if positions.is_inference() and not torch.is_inference_mode_enabled():
                return positions.scatter(-1, self.free, -1)  # which may not be written to outside of that mode
            positions.scatter_(-1, self.free, -1)
            self._marked = True
        return positions

    @property
    def slots(self) -> SlotInfo:
        bias = self._view("bias") if "bias" in self.memory else None
        return SlotInfo(self._ascending, self._packed and self.starts is None, bias=bias)

    @property
    def state(self) -> State:
        return {name: self._view(name) for name in self._statistics}

    @state.setter
    def state(self, state: State) -> None:
        if self.starts is not None:
            slots, taken = self._flat_slots()
            for name, x in state.items():
                self.memory[name][slots[taken]] = x[taken]

    @property
    def nbytes(self) -> int:
        if self._bytes is None:
            self._bytes = sum(x.nbytes for x in self.memory.values())
        lengths = (self.free,) if self.starts is None else (self.starts, self.counts)
        return self._bytes + sum(x.nbytes for x in lengths if x is not None)

    def sizes(self) -> Sizes:
        named = {name: x.nbytes for name, x in self.memory.items()}
        kinds = {"full precision": named["keys"] + named["values"], "positions": named["positions"]}
        return Sizes({**kinds, "statistics": self.nbytes - sum(kinds.values())}, self._spare_nbytes())

    def _spare_nbytes(self) -> int:
        count = self.positions.numel() if self.slots.packed else int((self.positions >= 0).sum())
        return (self.capacity - count) * (sum(x.nbytes for x in self.memory.values()) // max(self.capacity, 1))

    @property
    def capacity(self) -> int:
        """Slots of all segments."""
        return self.first.shape[: 3 if self.starts is None else 1].numel()

    @property
    def first(self) -> Tensor:
        """One of the tensors of the memory, for its number of slots."""
        return next(iter(self.memory.values()))

    def use(self, slots: int, room: int) -> None:
        """Set the number of slots in use, and of those after them."""
        self.used, self.room = slots, room
        self._views.clear()

    def _hold(self, name: str, memory: Tensor) -> None:
        """Replace a tensor, and drop the view of the old one."""
        self.memory[name], self._bytes = memory, None
        self._views.pop(name, None)

    def __getstate__(self) -> dict[str, object]:
        """The attributes of a copy, without views of its memory."""
        return {**vars(self), "_views": {}}

    def with_memory(self, memory: dict[str, Tensor], free: Tensor | None, counts: Tensor | None = None) -> Self:
        """The same layer with a copy of its memory, after appends to it.

        Only the slots `free` [B,H,1] are empty, at position -1; counts [B,H]: slots in use, for flat memory.
        """
        held = copy(self)
        held.memory, held.free, held._bytes, held.lent = memory, free, None, False
        held.counts = self.counts if counts is None else counts
        held._marked, held._packed = True, free is None and self.starts is None
        held._ascending = self._ascending and free is None
        return held

    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B,H] each, with the memory seen as flat: the starts of segments, their slots in use, and their free slot.

        Without a free slot, it is the next one.
        """
        starts, counts, first = self.starts, self.counts, self.first
        if starts is None or counts is None:
            starts = torch.arange(0, self.capacity, first.shape[2], device=first.device).view(first.shape[:2])
            counts = torch.full_like(starts, self.used)
        return starts, counts, counts if self.free is None else self.free[..., 0]

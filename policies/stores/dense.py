"""The dense store: plain tensors, slots overwritten in place."""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.policies.constants import on_device
from kvbench.policies.observation import State
from kvbench.policies.stores.slots import block_of, by_kind, owned, spread_index, take
from kvbench.policies.stores.store import LayerStore, Segments, Store


class DenseStore(LayerStore):
    """Buffers [B,H,capacity,...] of which the first `used` slots are in use."""

    _bytes: int | None = None  # of the buffers, once somebody asked

    def __init__(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        batch, heads = keys.shape[:2]
        self._buffers: dict[str, Tensor] = {
            "keys": keys.new_empty(batch, heads, 0, keys.shape[-1]),
            "values": values.new_empty(batch, heads, 0, values.shape[-1]),
            "positions": torch.full((batch, heads, 0), -1, dtype=torch.int32, device=keys.device),
        }
        wide = widen(keys.new_empty(0)).dtype
        self._statistics = statistics
        for name in statistics:
            self._buffers[name] = torch.zeros(batch, heads, 0, width, dtype=wide, device=keys.device)
        self._views: dict[str, Tensor] = {}
        self._used = 0
        self._to_come: int | None = None  # tokens that room was not made for yet, where their number is known
        self._packed = True
        self._ascending = True
        self._free: Tensor | None = None  # see `free`
        self._lent = False  # keys and values are the model's own tensors, which other caches may hold as well
        self._marked = True  # the free slots read -1: only written where somebody looks before the next token comes

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_views": {}}  # they are made when asked for
        state.pop("_bytes", None)
        return state

    @classmethod
    def of(cls, contents: State, statistics: tuple[str, ...], ascending: bool, packed: bool | None = None) -> Self:
        """A layer that holds `contents` [B,H,C,...]; some slots may be empty. packed: whether none is, if known."""
        held = cls(contents["keys"], contents["values"], statistics, width=0)
        held._buffers, held._used = contents, contents["positions"].shape[2]
        held._packed = bool((contents["positions"] >= 0).all()) if packed is None else packed
        held._ascending = ascending
        return held

    def parts(self) -> dict[str, int]:
        return by_kind({name: buffer.nbytes for name, buffer in self._buffers.items()}, self.nbytes)

    @property
    def shape(self) -> Hashable:
        if type(self) is not DenseStore:  # others may hold more than is joined
            return None
        if self._free is not None and self._used == self.capacity:
            return "at its size", tuple(self._buffers)  # of any length: no slot will be added
        if self._packed:
            return "grows", self.capacity - self._used, self._to_come, tuple(self._buffers)
        return None

    def each(self) -> list["DenseStore"]:
        """Every sequence by itself, in the same memory."""
        rows = self._buffers["keys"].shape[0]
        return [self] if rows == 1 else [self.picked(slice(row, row + 1)) for row in range(rows)]

    def picked(self, rows: Sequence[int] | slice) -> "DenseStore":
        held = self.with_buffers({name: buffer[rows] for name, buffer in self._buffers.items()})
        held._free = None if self._free is None else self._free[rows]
        return held

    def copied(self, buffers: dict[str, Tensor], free: Tensor | None, ascending: bool) -> "DenseStore":
        """A layer like this one in memory of its own, whose slots `free` [B,H,1] are empty."""
        held = self.with_buffers(buffers)
        held._free, held._ascending, held._lent = free, ascending, False
        return held

    def with_buffers(self, buffers: dict[str, Tensor]) -> "DenseStore":
        """The layer with other tensors [B,H,capacity,...] in the same slots."""
        held = copy(self)
        held._buffers, held._views, held._bytes = buffers, {}, None
        return held

    @property
    def slots(self) -> int:
        """Slots of its memory, over all sequences and KV heads."""
        return self._buffers["positions"].numel()

    @property
    def sequences(self) -> int:
        """How many it holds."""
        return len(self._buffers["positions"])

    @property
    def room(self) -> int:
        """Slots of a KV head behind those in use."""
        return self.capacity - self._used

    def goes_on(self, evicts: bool) -> bool:
        """Whether the next token has a slot, and later ones, if it evicts, those of evicted ones."""
        return (self._packed and self.room > 0) or (evicts and self._free is not None)

    def segments(self) -> Segments:
        """Every KV head's own part of the memory [B*H*capacity]."""
        rows, device = self._buffers["positions"].shape[:2], self._buffers["positions"].device
        held = self._used - (self._free is not None)
        starts = torch.arange(rows.numel(), device=device).view(rows) * self.capacity
        counts = torch.full(rows, held, device=device)
        return Segments(starts, counts, counts if self._free is None else self._free[..., 0], held)

    def moved(self, flat: Mapping[str, Tensor]) -> "DenseStore":
        """The layer copied to flat memory {name: [B*H*capacity,...]}: all slots are in use, some of them empty."""
        held = self.with_buffers({name: flat[name].view(x.shape) for name, x in self._buffers.items()})
        for name, x in self._buffers.items():
            held._buffers[name].copy_(x)
        held._buffers["positions"][:, :, self._used :] = -1
        if self._free is not None:
            held._buffers["positions"].scatter_(2, self._free, -1)
        held._free, held._packed, held._marked, held._lent = None, False, True, False
        held._use(self.capacity)
        return held

    def came_back(self, before: Segments, grown: int | None, free: Tensor) -> "DenseStore":
        """What `moved` made as it goes on by itself: so many tokens grew, or (None) slots free [B,H] are empty."""
        held = self.with_buffers(self._buffers)
        held._free = None if grown is not None else free[..., None].clone()
        held._packed, held._ascending = grown is not None, self._ascending and grown is not None
        held._use(before.most + (1 if grown is None else grown))
        return held

    def copied_out(self, sequence: int) -> "DenseStore":
        """One of its sequences, in memory of its own."""
        held = self.picked(slice(sequence, sequence + 1))
        return held.copied({name: x.clone() for name, x in held.buffers.items()}, held.free, held.ascending)

    def contents(self) -> dict[str, Tensor]:
        """Every tensor in use, [B,H,C,...]."""
        return {name: self._view(name) for name in self._buffers} | {"positions": self.positions}

    def _view(self, name: str) -> Tensor:
        """The slots in use; views are kept, because a layer at its budget is asked for the same ones in every step."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._buffers[name].narrow(2, 0, self._used)
        return view

    def _use(self, slots: int) -> None:
        """So many of the first slots are in use."""
        self._used = slots
        self._views.clear()

    def _put(self, name: str, buffer: Tensor) -> None:
        """Hold another buffer; a view of the old one would keep its memory."""
        self._buffers[name] = buffer
        self._views.pop(name, None)
        self._bytes = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All that is held, [B,H,capacity,...]: keys, values, positions, statistics."""
        return self._buffers

    @property
    def used(self) -> int:
        """How many of the first slots are in use."""
        return self._used

    @property
    def free(self) -> Tensor | None:
        """[B,H,1] the only empty slot of every KV head, where all have exactly one."""
        return self._free

    @property
    def keys(self) -> Tensor:
        return self._view("keys")

    @property
    def values(self) -> Tensor:
        return self._view("values")

    @property
    def positions(self) -> Tensor:
        positions = self._view("positions")
        if not self._marked and self._free is not None:
            if positions.is_inference() and not torch.is_inference_mode_enabled():
                return positions.scatter(-1, self._free, -1)  # which may not be written to outside of that mode
            positions.scatter_(-1, self._free, -1)
            self._marked = True
        return positions

    @property
    def bias(self) -> Tensor | None:
        return self._view("bias") if "bias" in self._buffers else None

    @property
    def state(self) -> State:
        return {name: self._view(name) for name in self._statistics}

    @property
    def nbytes(self) -> int:
        if self._bytes is None:
            self._bytes = sum(buffer.nbytes for buffer in self._buffers.values())
        return self._bytes if self._free is None else self._bytes + self._free.nbytes

    @property
    def spare_nbytes(self) -> int:
        empty = self.slots - int((self.positions >= 0).sum())
        return empty * (sum(buffer.nbytes for buffer in self._buffers.values()) // max(self.slots, 1))

    def expect(self, tokens: int) -> None:
        self._to_come = tokens

    @property
    def packed(self) -> bool:
        return self._packed

    @property
    def ascending(self) -> bool:
        return self._ascending

    @property
    def capacity(self) -> int:
        return self._buffers["positions"].shape[2]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        new = keys.shape[2]
        spread = positions.to(torch.int32).unsqueeze(1).expand(-1, keys.shape[1], -1)
        tokens = {"keys": keys, "values": values, "positions": spread if new == 1 else spread.contiguous()}
        if self._free is not None and new == 1 and not absent:
            self._overwrite(tokens, self._free)
            self.filled()
        elif self._packed and not absent:
            self._write_at_end(tokens, new)
        elif new == 1:
            self._fill_hole(tokens, absent)
        else:
            self._append_ragged(tokens)

    def filled(self) -> None:
        """The next token was written to the free slot, or behind the others where none is free."""
        if self._free is None:
            self._use(self._used + 1)
        else:
            self._free, self._packed, self._marked, self._ascending = None, True, True, False

    def _write_at_end(self, tokens: dict[str, Tensor], new: int) -> None:
        if self._used == 0 and self.capacity < new:
            self._hold(tokens, new)
        elif new > 1 and self._used + new > self.capacity:
            self._lengthen(new, tokens)
        else:
            if self._used + new > self.capacity:
                self._lengthen(self.growth(), {})
            for name, buffer in self._buffers.items():
                end = buffer.narrow(2, self._used, new)
                end.copy_(tokens[name]) if name in tokens else end.zero_()
        self._use(self._used + new)

    def _hold(self, tokens: dict[str, Tensor], new: int) -> None:
        """Hold the model's own tensors: the first tokens, of which there are often many."""
        for name, buffer in self._buffers.items():
            if name in tokens:
                self._put(name, owned(tokens[name]))
            else:
                self._put(name, buffer.new_zeros(*buffer.shape[:2], new, *buffer.shape[3:]))
        self._lent = True

    def _lengthen(self, more: int, tokens: Mapping[str, Tensor]) -> None:
        """Lay so many slots behind those in use: the tokens, or empty ones where there are none."""
        for name, buffer in self._buffers.items():
            behind = tokens.get(name)
            if behind is None:
                fill = -1 if name == "positions" else 0
                behind = buffer.new_full((*buffer.shape[:2], more, *buffer.shape[3:]), fill)
            self._put(name, torch.cat([buffer[:, :, : self._used], behind], dim=2))
        self._lent = False

    def _overwrite(self, tokens: dict[str, Tensor], slots: Tensor) -> None:
        """One token per KV head into slots [B,H,1]; its statistics start at 0."""
        where = slots
        for name, buffer in self._buffers.items():
            if where.shape[3:] != buffer.shape[3:]:  # most often values are as wide as keys
                where = spread_index(slots, buffer)
            buffer.scatter_(2, where, tokens.get(name, 0.0))

    def _fill_hole(self, tokens: dict[str, Tensor], absent: bool) -> None:
        """One token per KV head into its first empty slot, where sequences differ: some have no token or no room."""
        if not bool((self.positions < 0).any(-1).all()):
            if self._used == self.capacity:
                self._lengthen(self.growth(), {})
            self._use(self._used + 1)
        slots = (self.positions < 0).to(torch.uint8).argmax(-1, keepdim=True)
        if absent:
            entering = tokens["positions"] >= 0
            for name in tokens:
                held = take(self._buffers[name], slots)
                tokens[name] = torch.where(entering.reshape(slots.shape + (1,) * (held.dim() - 3)), tokens[name], held)
        self._overwrite(tokens, slots)
        self._free, self._ascending = None, False
        self._packed = bool((self.positions >= 0).all())

    def _append_ragged(self, tokens: dict[str, Tensor]) -> None:
        """Append where sequences differ in length: all tokens side by side, then close the gaps."""
        self._write_at_end(tokens, tokens["keys"].shape[2])
        self.keep(self.positions >= 0, spare=0)

    def growth(self) -> int:
        """How many slots to add for new tokens: no more than are known to come."""
        growth = block_of(self._to_come)
        self._to_come = self._to_come and max(0, self._to_come - growth)
        return growth

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if bias is not None:
            if "bias" not in self._buffers:
                places = self._buffers["positions"]
                self._put("bias", torch.zeros(places.shape, dtype=torch.float32, device=places.device))
            self._buffers["bias"].scatter_(2, slots, bias)
        where = slots
        for name, new in (("keys", keys), ("values", values)):
            if self._lent:
                self._put(name, self._buffers[name].clone())
            buffer = self._buffers[name]
            if where.shape[3:] != buffer.shape[3:]:  # most often values are as wide as keys
                where = spread_index(slots, buffer)
            buffer.scatter_(2, where, new.to(buffer.dtype))
        self._lent = False

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        if counts is None or not mask.is_cuda:  # on a GPU, the host would wait for what it knows
            numbers = mask.sum(-1).flatten().tolist()
            most, least = max(numbers), min(numbers)
            assert counts is None or (most, least) == (max(counts), min(counts)), "counts are those of the mask"
        else:
            most, least = max(counts), min(counts)
        slots = self._gather(mask, most, spare, even=most == least)
        self._use(most)
        self._packed, self._ascending, self._free, self._lent = most == least, True, None, False
        self.evicted = True
        return slots

    def _gather(self, mask: Tensor, most: int, spare: int, even: bool) -> Tensor:
        """Move the slots of the mask to the front, `most` of a KV head at most (even: just so many), room behind."""
        if not self._used:  # a sequence that shows nothing yet
            self._lengthen(spare, {})
            return torch.empty(*mask.shape[:2], 0, dtype=torch.long, device=mask.device)
        if even and self._ascending and mask.is_cpu:  # on a GPU, the host would wait for `nonzero`
            slots = mask.nonzero()[:, -1].view(*mask.shape[:2], most)
        else:
            order = self.positions.masked_fill(~mask, torch.iinfo(torch.int32).max)
            slots = order.argsort(dim=-1, stable=True)[..., :most]
        staying = None if even else mask.gather(-1, slots)
        places = F.pad(slots, (0, spare))  # what comes to lie in the room is emptied
        for name, buffer in self._buffers.items():
            self._put(name, take(buffer[:, :, : self._used], places))
            self._buffers[name].narrow(2, most, spare).fill_(-1 if name == "positions" else 0)
        if staying is not None:
            self._buffers["positions"].narrow(2, 0, most).masked_fill_(~staying, -1)
        return slots

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        if rows is None and self._packed:
            self._free, self._marked = slots, False
        else:
            positions = self.positions
            released = torch.full_like(positions[..., :1], -1)
            if rows is not None:
                going = on_device(tuple(rows), slots.device)[:, None, None]
                released = torch.where(going, released, positions.gather(-1, slots))
            positions.scatter_(-1, slots, released)
            self._free = None
        self._packed = False


@dataclass(frozen=True)
class Dense(Store):
    """Keys and values as the model made them, in its dtype."""

    exact = True
    replayable = True

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return DenseStore(keys, values, statistics, width)

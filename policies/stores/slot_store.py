"""The slot store: the tokens of one layer in full precision, in slots that are overwritten in place.

Every KV head of every sequence owns a segment of slots. Segments of equal length form tensors [B,H,C,...]; segments of
different lengths are in `kvbench.policies.stores.ragged`.

Shapes: B sequences, H KV heads, C slots of a segment, D head dim.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.kernels.selection import extremes, partitioned, slots_in_order, spread_index, take
from kvbench.policies.constants import on_device
from kvbench.policies.observation import SlotInfo, State
from kvbench.policies.stores.slots import GROWTH, copy_each, owned, writable
from kvbench.policies.stores.store import LayerStore, Sizes

SIDES = ("keys", "values")
"""The first words of the names of tensors with keys and with values."""


class SlotStore(LayerStore):
    """Segments of which the first `used` slots are in use; `memory`: keys, values, positions and statistics by name.

    starts, counts [B,H]: the start of each segment and its slots in use, where segments differ in length. free [B,H,1]:
    the only empty slot of every KV head, if each has exactly one. room: slots after those in use. lent: keys and values
    are the model's own tensors, which other caches may hold too. Memory without positions has its i-th token at
    position i.
    """

    starts: Tensor | None = None
    counts: Tensor | None = None

    def __init__(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        none = keys[:, :, :0, 0]
        self.memory: dict[str, Tensor] = {
            "keys": keys[:, :, :0],
            "values": values[:, :, :0],
            "positions": none.to(torch.int32),
            **{name: widen(none)[..., None].expand(-1, -1, -1, width) for name in statistics},
        }
        self._statistics = statistics
        self.free: Tensor | None = None
        self.used = self.room = 0
        self.lent = False
        self._expected: int | None = None  # tokens to come without reserved slots, if their number is known
        self._packed = self._ascending = True
        self._whole = True  # until several tokens are evicted at once

    @classmethod
    def of(cls, contents: State, statistics: tuple[str, ...], ascending: bool, packed: bool | None = None) -> Self:
        """A layer with `contents` [B,H,C,...], which may have empty slots. packed: whether none is empty, if known."""
        held = cls(contents["keys"], contents["values"], statistics, width=0)
        held.memory, held.used = contents, contents["positions"].shape[2]
        held._packed = bool((contents["positions"] >= 0).all()) if packed is None else packed
        held._ascending = ascending
        return held

    def _view(self, name: str) -> Tensor:
        """The slots in use, [B,H,used,...]: a view."""
        return self.memory[name].narrow(2, 0, self.used)

    def contents(self) -> dict[str, Tensor]:
        """All slots in use by name, [B,H,C,...]."""
        return {name: self._view(name) for name in self.memory} | {"positions": self.positions}

    def store_positions(self) -> None:
        """Store the positions of memory without them, before a token is evicted or missing."""
        if "positions" not in self.memory:
            self.memory["positions"] = self.slot_positions().contiguous()

    def slot_positions(self) -> Tensor:
        """Positions of all slots, in the shape of the memory; -1 in empty and spare ones."""
        if "positions" in self.memory:
            return self.memory["positions"]
        places = torch.arange(self.first.shape[2], dtype=torch.int32, device=self.first.device)
        return places.masked_fill_(places >= self.used, -1).expand(self.first.shape[:3])

    @property
    def token_memory(self) -> dict[str, Tensor]:
        """The tensors that hold keys and values, or their codes; the others are positions, statistics and a bias."""
        return {name: x for name, x in self.memory.items() if name.partition(" ")[0] in SIDES}

    @property
    def step_format(self) -> tuple[object, ...] | None:
        """Layers of equal formats take their decoding steps in one table; None: this one cannot."""
        dims = self.memory["keys"].shape[-1], self.memory["values"].shape[-1]
        return "dense", *dims, "bias" in self.memory

    @property
    def keys(self) -> Tensor:
        return self._view("keys")

    @property
    def values(self) -> Tensor:
        return self._view("values")

    @property
    def positions(self) -> Tensor:
        return self.slot_positions().narrow(2, 0, self.used)

    @property
    def slots(self) -> SlotInfo:
        bias = self._view("bias") if "bias" in self.memory else None
        return SlotInfo(self._ascending, self._packed, bias=bias)

    @property
    def state(self) -> State:
        return {name: self._view(name) for name in self._statistics}

    @state.setter
    def state(self, state: State) -> None:
        """Nothing to do: statistics are views, which were changed in place."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.memory.values(), self.free) if x is not None)

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
        return self.first.shape[:3].numel()

    @property
    def first(self) -> Tensor:
        """One of the tensors of the memory, for its number of slots."""
        return next(iter(self.memory.values()))

    @property
    def like(self) -> Tensor:
        """A tensor of the model's dtype on the device of the slots."""
        return self.memory["keys"]

    def grown(self, used: int, taken: int, free: Tensor | None, counts: Tensor | None) -> None:
        """Note that new tokens took slots: `used` are in use now, `taken` more than before; see `with_memory`."""
        self.use(used, self.room - taken)
        self.free, self._packed = free, free is None

    def use(self, slots: int, room: int) -> None:
        """Set the number of slots in use, and of those after them."""
        self.used, self.room = slots, room

    def with_memory(self, memory: dict[str, Tensor], free: Tensor | None, counts: Tensor | None = None) -> Self:
        """The same layer with a copy of its memory, after appends to it.

        Only the slots `free` [B,H,1] are empty, at position -1; counts [B,H]: slots in use, for flat memory.
        """
        held = copy(self)
        held.memory, held.free, held.lent = memory, free, False
        held._packed = free is None
        held._ascending = self._ascending and free is None
        return held

    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B,H] each, with the memory seen as flat: the starts of segments, their slots in use, and their free slot.

        Without a free slot, it is the next one.
        """
        first = self.first
        starts = torch.arange(0, self.capacity, first.shape[2], device=first.device).view(first.shape[:2])
        counts = torch.full_like(starts, self.used)
        return starts, counts, counts if self.free is None else self.free[..., 0]

    # --- append ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self._enter({"keys": keys, "values": values}, positions)

    def _enter(self, tokens: dict[str, Tensor], positions: Tensor) -> None:
        """Append tokens [B,H,T,...] by name at positions [B,T]."""
        new = positions.shape[1]
        if "positions" in self.memory:
            heads = next(iter(tokens.values())).shape[1]
            spread = positions.to(torch.int32).unsqueeze(1).expand(-1, heads, -1)
            tokens = {**tokens, "positions": spread if new == 1 else spread.contiguous()}
        if self.free is not None and new == 1:
            self._put(self.free, tokens)
            self.free, self._packed, self._ascending = None, True, False
        elif self._packed:
            self._write_at_end(tokens, new)
        elif new == 1:
            self._fill_hole(tokens)
        else:  # heads differ in length: write all tokens at the end, then close the gaps
            self._write_at_end(tokens, new)
            self._compact(self.positions >= 0, 0, None)

    def _put(self, slots: Tensor, tokens: Mapping[str, Tensor], all_names: bool = True) -> None:
        """Write [B,H,n,...] by name to slots [B,H,n]; other tensors (statistics) are set to 0 if `all_names`."""
        for name, x in self.memory.items():
            new = tokens.get(name, 0.0)
            if name in tokens or all_names:
                x.scatter_(2, spread_index(slots, x), new)

    def _write_at_end(self, tokens: dict[str, Tensor], new: int) -> None:
        used, room = self.used, self.room
        if used == 0 and room < new:  # keep the model's tensors of the first tokens, which are often many
            for name, x in self.memory.items():
                zeros = None if name in tokens else x.new_zeros(*x.shape[:2], new, *x.shape[3:])
                self.memory[name] = owned(tokens[name]) if zeros is None else zeros
            self.lent = True
        elif new > 1 and new > room:
            self._lengthen(new, tokens)
        else:
            self.reserve()
            for name, x in self.memory.items():
                end = x.narrow(2, used, new)
                end.copy_(tokens[name]) if name in tokens else end.zero_()
        self.use(used + new, self.first.shape[2] - used - new)

    def _lengthen(self, more: int, tokens: Mapping[str, Tensor]) -> None:
        """Add slots after those in use of every segment, with the tokens or empty."""
        for name, x in self.memory.items():
            behind = tokens.get(name)
            if behind is None:
                behind = x.new_full((*x.shape[:2], more, *x.shape[3:]), -1 if name == "positions" else 0)
            self.memory[name] = torch.cat([x[:, :, : self.used], behind], dim=2)
        self.room, self.lent = more, False

    def expect(self, tokens: int) -> None:
        self._expected = tokens

    def reserve(self) -> None:
        """Reserve slots if none is left, at most as many as tokens are expected."""
        if self.room == 0:
            self._lengthen(self._growth(), {})

    def _growth(self) -> int:
        """Slots to reserve at once."""
        growth = GROWTH
        if self._expected:
            growth = min(max(GROWTH, self._expected // 4), self._expected)  # long answers take few copies
            self._expected -= growth
        return growth

    def tokens_of(self, name: str) -> int:
        """The number of tokens that share an entry of a tensor of the memory."""
        return 1

    def _fill_hole(self, tokens: dict[str, Tensor]) -> None:
        """Write one token per KV head into its first empty slot; some heads may have no such slot."""
        if not bool((self.positions < 0).any(-1).all()):
            self.reserve()
            self.use(self.used + 1, self.room - 1)
        slots = (self.positions < 0).to(torch.uint8).argmax(-1, keepdim=True)
        self._put(slots, tokens)
        self.free, self._ascending = None, False
        self._packed = bool((self.positions >= 0).all())

    # --- evict and merge -------------------------------------------------------------------------------------------
    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if bias is not None:
            if "bias" not in self.memory:
                places = self.memory["positions"]
                self.memory["bias"] = torch.zeros(places.shape, dtype=torch.float32, device=places.device)
            self.memory["bias"].scatter_(2, slots, bias)
        if self.lent:
            for name in ("keys", "values"):
                self.memory[name] = self.memory[name].clone()
            self.lent = False
        new = {"keys": keys.to(self.memory["keys"].dtype), "values": values.to(self.memory["values"].dtype)}
        self._put(slots, new, all_names=False)

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self.store_positions()
        slots = self._compact(mask, spare, count)
        self._whole = False
        return slots

    @property
    def holds_exact(self) -> bool:
        """Whether the slots in use have keys and values, not their codes."""
        return "keys" in self.memory

    def kept(self, slots: int, spare: int) -> None:
        """Note that the memory has `slots` kept tokens in order of position, and `spare` empty slots after them."""
        self.use(slots, spare)
        self._packed = self._ascending = True
        self._whole, self.free, self.lent = False, None, False

    def replace(self, contents: State, ascending: bool, spare: int = 0) -> None:
        """Replace all tensors by [B,H,n,...] of kept tokens; only the last `spare` slots are empty."""
        self.memory |= contents
        self.use(contents["positions"].shape[2] - spare, spare)
        self._packed, self._ascending, self._whole = True, ascending, False
        self.free, self.lent = None, False

    def _compact(self, mask: Tensor, spare: int, count: int | None) -> Tensor:
        most, least = extremes(mask, count)
        slots = self._gather(mask, most, spare, even=most == least)
        self.use(most, spare)
        self._packed, self._ascending, self.free, self.lent = most == least, True, None, False
        return slots

    def _gather(self, mask: Tensor, most: int, spare: int, even: bool) -> Tensor:
        """Move the slots of the mask to the front, at most `most` per KV head (even: exactly), then `spare` slots."""
        if not self.used:  # a sequence without a token
            self._lengthen(spare, {})
            return mask.long()
        slots = slots_in_order(self.positions, mask, most, even and self._ascending)
        staying = None if even else mask.gather(-1, slots)
        self._move(slots, spare)
        if staying is not None:
            self.memory["positions"].narrow(2, 0, most).masked_fill_(~staying, -1)
        return slots

    def _move(self, slots: Tensor, spare: int) -> None:
        """Move slots [B,H,n] to the front, followed by `spare` empty ones."""
        contents = {name: x[:, :, : self.used] for name, x in self.memory.items()}
        rewrite([self], slots, [slots.shape[2]], spare, contents, {})


def rewrite(
    stores: Sequence[SlotStore],
    slots: Tensor,
    counts: Sequence[int],
    spare: int,
    contents: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
) -> None:
    """Move slots [n,H,k] of n stores to their fronts, counts[i] <= k of the i-th, followed by `spare` empty ones.

    contents: the slots in use of all stores by name, [n,H,C,...]. new: changed ones of the moved slots, [n,H,k,...].
    Memory of the right size is written in place, so that a recorded block can be replayed; else, and with tensors that
    the stores do not have yet (a first bias), the new tensors of all stores are parts of one.
    """
    most, sizes = slots.shape[2], [count + spare for count in counts]
    stays = all(
        store.first.shape[2] == size
        and not store.lent
        and writable(store.first)
        and store.memory.keys() >= contents.keys()
        for store, size in zip(stores, sizes, strict=True)
    )
    cut = None if len(set(counts)) == 1 else _cut(counts, slots, spare)
    for name, x in contents.items():
        if name in new:
            whole = F.pad(new[name], (*[0] * 2 * (x.dim() - 3), 0, spare))
        else:
            whole = take(x, F.pad(slots, (0, spare)))
        whole.narrow(2, most, spare).fill_(-1 if name == "positions" else 0)
        if cut is None:
            rows = [whole] if len(stores) == 1 else [whole[row : row + 1] for row in range(len(stores))]
        else:
            heads, parts = whole.shape[1], whole.flatten(0, 2).index_select(0, cut)
            rows = [
                part.view(1, heads, size, *whole.shape[3:])
                for part, size in zip(parts.split([heads * size for size in sizes]), sizes, strict=True)
            ]
        if stays:
            copy_each([(store.memory[name], own) for store, own in zip(stores, rows, strict=True)])
            continue
        for store, own in zip(stores, rows, strict=True):
            store.memory[name] = own


def _cut(counts: Sequence[int], slots: Tensor, spare: int) -> Tensor:
    """Where the first counts[i] of slots [n,H,k] of every row, and `spare` slots after all k, are in n * H rows."""
    rows, heads, most = slots.shape
    place = torch.arange(most + spare, device=slots.device)
    stays = (place < on_device(tuple(counts), slots.device)[:, None]) | (place >= most)
    order = partitioned(stays[:, None].expand(-1, heads, -1).reshape(-1))
    return order[: heads * (sum(counts) + rows * spare)]

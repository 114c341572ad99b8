"""Layers of codes in groups during decoding steps on a GPU: codes in flat slots, the newest tokens exact in a ring.

A `ColumnLayer` becomes `GroupSlots` while a batch on a GPU has it. Token i of a layer is in place i % E of the ring,
which is part of the state of a row; what a step changes is on the device. The codec encodes groups between two steps:
`columns` gives the layer back as it would be without the batch, and its `settle` encodes what is due.

Shapes: L layers, P rows of a step, H KV heads, C slots, E places of the ring, n traced tokens, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import astuple, replace
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.group_codes import FlatCodes, Ring, append_groups, decode_groups
from kvbench.kernels.group_formats import Form
from kvbench.kernels.references import NewTokens, decode_attention_ref, widen
from kvbench.kernels.tiles import decodes
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.column_layer import ColumnLayer
from kvbench.policies.stores.columns import Column, Columns, Queue, Room, Run
from kvbench.policies.stores.slot_store import SIDES, SlotStore
from kvbench.policies.stores.store import Sizes

EXACT = ("exact keys", "exact values", "exact positions")
SPARE = 256  # slots that a layer has beyond those that it uses until its next groups are encoded, at least


class GroupSlots(SlotStore):
    """The codes of a layer in slots [1,H,C,...] by name; a group of U tokens fills the slots of its tokens.

    Slots at position -1 hold no token in codes. used: tokens of the layer. room: steps until the codec encodes a group.
    exact: keys, values and positions [1,H,E+n,...] of the ring and of traced tokens, by name. coded [1,H]: tokens that
    attention reads from codes.
    """

    def __init__(self, layer: ColumnLayer) -> None:
        (part,) = layer.parts
        keys, values = part.columns
        super().__init__(keys.tail.view("x")[:, :, :0], values.tail.view("x")[:, :, :0], (), 1)
        self.codec, self._layer, self._positions = layer.codec, copy(layer), layer.positions
        self.use(keys.tokens, next(n for n in count(1) if layer.codec.due(0, keys.tail.count + n)))
        coded, rows = min(keys.coded, values.coded), self._positions.shape[:2]
        self.coded = torch.full(rows, coded, device=self._positions.device)
        self.memory = self._memory(part, coded)
        self.exact = self._ring(part, coded)
        self._rooms = [replace(queue.room) for queue in part.queues]  # of places; tail and codes of keys; of values
        self._before_settle = [replace(room) for room in self._rooms]
        self._entries = [_entry_nbytes(queue) for queue in part.queues]
        self._nbytes = layer.nbytes
        self._fixed = self._nbytes - self._queue_nbytes(self._rooms)
        self._part, self._layer.parts = copy(part), []
        self._part.columns, self._part.places = (_without_tensors(keys), _without_tensors(values)), Queue(0)

    def _memory(self, part: Columns, coded: int) -> dict[str, Tensor]:
        """The codes in slots, enough of them until the codec encodes the next group."""
        if self.used + self.room > self._layer.reserved:
            self._layer.reserved = self.used + self.room + max(SPARE, self.used // 8)
        unit, memory = self._form(0).unit, dict[str, Tensor]()
        slots = -(-self._layer.reserved // unit) * unit
        for side, column in enumerate(part.columns):
            codes = column.runs[0].codes
            for name, x in codes.some(0, codes.count).items():
                memory[f"{SIDES[side]} {name}"] = _spread(x, self._form(side).tokens, slots)
        return memory | {"positions": F.pad(self._positions[..., :coded], (0, slots - coded), value=-1)}

    def _form(self, side: int) -> Form:
        return form_of(self.codec, side, self._layer.dims[side])

    def _ring(self, part: Columns, coded: int) -> dict[str, Tensor]:
        """The tokens after the first `coded` ones in their places, and the traced tokens behind the ring."""
        ring, positions, traced = self.codec.most_exact, self._positions, self.codec.traced(part)
        size = *positions.shape[:2], ring + (0 if traced is None else traced.slots.shape[2])
        places, where = self._places(coded), positions.new_full(size, -1)
        where[..., places] = positions[..., coded:]
        found = {}
        for name, column in zip(EXACT, part.columns, strict=False):
            x = column.after(coded)
            found[name] = x.new_zeros(*size, x.shape[3])
            found[name][:, :, places] = x
        if traced is not None:
            empty, hidden = traced.slots < 0, F.pad(self.memory["positions"], (0, 1))
            where[..., ring:] = positions.gather(-1, traced.slots.long().clamp(min=0)).masked_fill(empty, -1)
            for name, x in zip(EXACT, traced[:2], strict=False):
                found[name][:, :, ring:] = x
            slots = traced.slots.long().masked_fill(empty, hidden.shape[-1] - 1)
            self.memory["positions"] = hidden.scatter(-1, slots, -1)[..., :-1].contiguous()  # not read from codes
        return found | {EXACT[2]: where}

    def _places(self, first: int) -> Tensor:
        """The places of tokens from number `first` on."""
        return torch.arange(first, self.used, device=self.coded.device) % self.codec.most_exact

    @property
    def like(self) -> Tensor:
        return self.exact[EXACT[0]]

    # --- as a layer ------------------------------------------------------------------------------------------------
    def columns(self) -> ColumnLayer:
        """The layer as it would be without the batch, before it settles; `exact` and `memory` must be up to date."""
        layer, part, found = copy(self._layer), copy(self._part), []
        places, *rooms = map(replace, self._before_settle)
        if self._entries[0]:
            new = self._places(self._positions.shape[2])
            positions = torch.cat([self._positions, self.exact[EXACT[2]][..., new]], dim=-1)
            part.places = Queue.of({"positions": positions}, places)
        for side, column in enumerate(part.columns):
            tail, run, form, held = *rooms[2 * side : 2 * side + 2], self._form(side), dict[str, Tensor]()
            for name, shape in form.shapes.items():
                x = self.memory[f"{SIDES[side]} {name}"][:, :, : run.count * form.tokens]
                held[name] = _gathered(x, form.tokens, shape)
            own = copy(column)
            own.tail = Queue.of({"x": self.exact[EXACT[side]][:, :, self._places(self.used - tail.count)]}, tail)
            own.runs = [Run(Queue.of(held, run), run.count * form.tokens)]
            found.append(own)
        part.columns, layer.parts = (found[0], found[1]), [part]
        return layer

    def _settled(self) -> ColumnLayer:
        layer = self.columns()
        layer.settle()
        return layer

    @property
    def keys(self) -> Tensor:
        return self._settled().keys

    @property
    def values(self) -> Tensor:
        return self._settled().values

    @property
    def positions(self) -> Tensor:
        return self.columns().positions

    # --- bytes, as they would be without the batch ------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return self._nbytes

    def sizes(self) -> Sizes:
        return self._settled().sizes()

    def _queue_nbytes(self, rooms: Iterable[Room]) -> int:
        return sum(room.capacity * each for room, each in zip(rooms, self._entries, strict=True))

    def _sizes_of_steps(self, steps: int) -> list[int]:
        """Bytes of the queues after the append of each of the next steps, and after its `settle`."""
        sizes, tails, codes = [], self._rooms[1::2], self._rooms[2::2]
        for _ in range(steps):
            for room in (self._rooms[0], *tails):
                room.enter(1)
            sizes.append(self._queue_nbytes(self._rooms))
            self._before_settle = list(map(replace, self._rooms))
            for side, (tail, run) in enumerate(zip(tails, codes, strict=True)):
                due = self.codec.due(side, tail.count)
                if due:
                    run.enter(due // self._form(side).tokens)
                    tail.leave(due)
            sizes.append(self._queue_nbytes(self._rooms))
        return sizes


def count_bytes(stores: Sequence[GroupSlots], steps: int) -> Iterator[int]:
    """Follow the bytes of a sequence's layers over some steps; yields the index of a layer when its bytes changed."""
    known: dict[object, tuple[GroupSlots, list[int]]] = {}
    sizes = []
    for store in stores:
        alike = store.codec.due, *map(astuple, store._rooms), *store._entries
        if alike not in known:
            known[alike] = store, store._sizes_of_steps(steps)
        first, own = known[alike]
        sizes.append(own)
        store._rooms = list(map(replace, first._rooms))
        store._before_settle = list(map(replace, first._before_settle))
    for step in range(steps):
        for index, (store, own) in enumerate(zip(stores, sizes, strict=True)):
            for size in own[2 * step : 2 * step + 2]:
                if store._nbytes != store._fixed + size:
                    store._nbytes = store._fixed + size
                    yield index


def form_of(codec: Coding, side: int, dim: int) -> Form:
    """The form of the codes of keys (side 0) or values (1) of D = `dim` numbers."""
    form = codec.packed(side, dim)
    assert form is not None
    return form


def _spread(x: Tensor, unit: int, slots: int) -> Tensor:
    """Entries [1,H,m,...] of `unit` tokens in the slots of their tokens, [1,H,slots,w], padded with 0."""
    x = x.flatten(3)
    x = F.pad(x, (0, -x.shape[-1] % unit)).reshape(*x.shape[:2], x.shape[2] * unit, -1)
    return F.pad(x, (0, 0, 0, slots - x.shape[2]))


def _gathered(x: Tensor, unit: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_spread`: entries [B,H,m,*shape]."""
    entries = x.reshape(*x.shape[:2], -1, unit * x.shape[3])[..., : math.prod(shape)]
    return entries.reshape(*entries.shape[:3], *shape)


def _entry_nbytes(queue: Queue) -> int:
    return sum(x.shape[:2].numel() * x.shape[3:].numel() * x.itemsize for x in queue.tensors.values())


def _without_tensors(column: Column) -> Column:
    found = copy(column)
    found.tail, found.runs = Queue(0), []
    return found


# --- a decoding step -------------------------------------------------------------------------------------------------
def take_places(
    state: Mapping[str, Tensor], ring: int, positions: Tensor, offsets: Tensor, nowhere: int,
    into: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Take a place of the ring for the next token of every row, and a slot for the token that it displaces.

    state: of the rows, by name, [L,P,H,...], whose `counts` include the new token. positions [L,N], of which layers are
    at `offsets` [L,1,1]. nowhere: a slot that is not read, for rows in which no token becomes a code (slot -1). into:
    places and slots [L,P,H].
    """
    coded, held, (places, gone) = state["coded"], state[EXACT[2]], into
    torch.remainder(state["counts"] - 1, ring, out=places)
    moved, index = coded < state["counts"] - ring, places[..., None]
    gone.copy_(torch.where(moved, coded, -1))
    slots = torch.where(moved, state["starts"] + coded, nowhere) + offsets
    old = torch.where(moved, held.gather(-1, index)[..., 0], -1)
    positions.view(-1).scatter_(0, slots.flatten(), old.flatten())
    held.scatter_(-1, index, state["next"].int().expand_as(places)[..., None])
    coded += moved


def group_step(
    codec: Coding, queries: Tensor, new: NewTokens, gone: Tensor, memory: Mapping[str, Tensor], ring: Ring,
    places: tuple[Tensor, Tensor], segments: tuple[Tensor, Tensor], most: int, how: AttentionParams,
) -> Tensor:  # fmt: skip
    """Attention [B,H_q,1,D] of the newest queries over segments of codes and a ring that takes the new tokens first.

    new: with places of the ring. gone [B,H]: slots of the displaced tokens, whose values are encoded; -1: none. memory:
    flat, by name. places: positions of queries [B,1] and slots [N]. segments: starts and tokens in codes [B,H], at most
    `most`. Nothing waits for a GPU, so that the step can be recorded.
    """
    if not decodes(queries):
        return group_step_ref(codec, queries, new, gone, memory, ring, places, segments, most, how)
    keys, values = (flat_codes(codec, memory, side, x.shape[-1]) for side, x in enumerate(ring[:2]))
    append_groups(values, ring, segments[0], new, gone)
    return decode_groups(queries, keys, values, ring, places, segments, most, how.for_kernels)


def group_step_ref(
    codec: Coding, queries: Tensor, new: NewTokens, gone: Tensor, memory: Mapping[str, Tensor], ring: Ring,
    places: tuple[Tensor, Tensor], segments: tuple[Tensor, Tensor], most: int, how: AttentionParams,
) -> Tensor:  # fmt: skip
    """The definition of `group_step`: encode displaced values, dequantize all codes, attend to them and the ring."""
    index, forms = new.slots[..., None, None], [form_of(codec, side, x.shape[-1]) for side, x in enumerate(ring[:2])]
    if forms[1].per_token:
        _encode(codec, ring.values, index, gone, memory, segments[0])
    for x, token in ((ring.keys, new.keys), (ring.values, new.values)):
        x.scatter_(2, index.expand_as(token), token)
    unit = max(form.tokens for form in forms)
    steps = torch.arange(-(-most // unit) * unit, device=queries.device)
    slots = (segments[0][..., None] + steps).clamp(max=len(places[1]) - 1)
    found = []
    for side, (form, exact) in enumerate(zip(forms, ring[:2], strict=True)):
        held = {name: memory[f"{SIDES[side]} {name}"][slots] for name in form.shapes}
        own = {name: _gathered(x, form.tokens, form.shapes[name]) for name, x in held.items()}
        x = codec.decode(own, side, len(steps), exact.shape[-1])
        x = x.flatten(2, 3) if x.dim() == 5 else x
        found.append(torch.cat([x, exact], dim=2).to(widen(exact).dtype))
    positions = places[1][slots].masked_fill(steps >= segments[1][..., None], -1)
    positions = torch.cat([positions, ring.positions], dim=-1)
    out = decode_attention_ref(widen(queries), found[0], found[1], places[0], positions, *how.for_kernels).out
    return out.to(queries.dtype)


def _encode(
    codec: Coding, values: Tensor, index: Tensor, gone: Tensor, memory: Mapping[str, Tensor], starts: Tensor
) -> None:
    """Encode the values of a ring at `index` [B,H,1,1] into their slots."""
    old = values.gather(2, index.expand(-1, -1, -1, values.shape[-1]))
    slots = torch.where(gone < 0, 0, starts + gone)
    for name, x in codec.encode(old, 1).items():
        flat = memory[f"{SIDES[1]} {name}"]
        own = torch.where((gone < 0)[..., None], flat[slots], x[:, :, 0].flatten(2))
        flat.index_copy_(0, slots.flatten(), own.flatten(0, 1))


def flat_codes(codec: Coding, memory: Mapping[str, Tensor], side: int, dim: int) -> FlatCodes:
    """The codes of one side as kernels read them; D = `dim`."""
    form = form_of(codec, side, dim)
    words, scale, minimum = (memory[f"{SIDES[side]} {name}"] for name in form.shapes)
    return FlatCodes(words, scale, minimum, form)

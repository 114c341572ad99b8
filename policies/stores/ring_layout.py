"""The layer of codes in groups that later groups extend (KIVI, KC-VC, OTT), on all devices.

Codes of keys, and of values, are entries of a group of tokens or of one, oldest first. Kernels read both sides from
codes up to the same token; a side whose codes reach further has the tokens beyond it dequantised in its ring (`level`).

Shapes: H KV heads, m entries, E places of a ring, n traced tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.stores.coded_layer import LAST, CodedLayer, CodeRun, split
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import CODED, RING, form_of
from kvbench.policies.stores.slot_store import SIDES
from kvbench.policies.stores.slots import GROWTH


class RingLayer(CodedLayer):
    """memory: the entries of codes by name, [1,H,m,...]. room: later tokens for whose codes entries are reserved."""

    levelled = False

    def __init__(self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        super().__init__(codec, keys, values, statistics, width)
        self._each = form_of(codec, 0, keys.shape[-1]).tokens, form_of(codec, 1, values.shape[-1]).tokens
        self._reserved = 0  # tokens for which both sides have entries, and the rings all places

    def _flush(self, first: bool) -> None:
        before = self.in_codes
        super()._flush(first)
        if first:
            self._add_empty_codes()
        if self.levelled:
            self._level(before)

    # --- codes ------------------------------------------------------------------------------------------------------
    def tokens_of(self, name: str) -> int:
        return self._each[_side_of(name)] if self.coded else 1

    def hold(self, side: int, tokens: int, codes: Mapping[str, Tensor], again: bool = False) -> None:
        first, end = (number // self._each[side] for number in (self.in_codes[side], self.in_codes[side] + tokens))
        for name, x in codes.items():
            whole = self.memory.get(own := f"{SIDES[side]} {name}")
            if whole is None:
                self.memory[own] = x.contiguous()
                continue
            if end > whole.shape[2]:
                growth = GROWTH if self._expected is None else min(GROWTH, self._expected)
                whole = self._longer(own, end + growth // self._each[side])
                self._reserved = self.room = 0
            whole[:, :, first:end] = x
        self._became_codes(side, tokens)

    def _longer(self, name: str, entries: int) -> Tensor:
        x = self.memory[name]
        self.memory[name] = F.pad(x, (*[0, 0] * (x.dim() - 3), 0, entries - x.shape[2]))
        return self.memory[name]

    def _add_empty_codes(self) -> None:
        """Name the tensors of codes before the first group is full."""
        for side, like in enumerate(self._like):
            if not self.in_codes[side]:
                shape = *like.shape[:2], self._each[side], like.shape[3]
                codes = self.codec.encode(like.new_zeros(shape), side)
                self.memory |= {f"{SIDES[side]} {name}": x[:, :, :0].clone() for name, x in codes.items()}

    def dequantised(self, side: int, first: int, end: int) -> Tensor:
        """Tokens from `first` on, from their codes: [1,H,n,D]."""
        each = self._each[side]
        start = first // each * each
        x = self._decode(self.codes_of(side), side, slice(start, -(-end // each) * each)).flatten(2, 3)
        return x[:, :, first - start : end - start]

    def codes_of(self, side: int) -> Mapping[str, Tensor]:
        return {name.partition(" ")[2]: x for name, x in self.memory.items() if _side_of(name) == side}

    def _decode(self, codes: Mapping[str, Tensor], side: int, some: slice) -> Tensor:
        """A range of tokens, of whole entries, from their codes: [1,H,m,n/m,D]."""
        entries = slice(some.start // self._each[side], some.stop // self._each[side])
        own = {name: x[:, :, entries] for name, x in codes.items()}
        x = self.codec.decode(own, side, some.stop - some.start, self._like[side].shape[-1])
        return x if x.dim() == 5 else x[:, :, None]

    def _runs(self, side: int) -> Iterator[CodeRun]:
        if self.in_codes[side]:
            yield CodeRun(self.in_codes[side], self._each[side], partial(self._decode, self.codes_of(side), side))

    def _codes(self) -> Iterator[tuple[str, Tensor, int]]:
        for name, x in self.memory.items():
            yield name.partition(" ")[2], x, self.in_codes[_side_of(name)] // self.tokens_of(name)

    # --- in a table -------------------------------------------------------------------------------------------------
    @property
    def step_format(self) -> tuple[object, ...] | None:
        dims = [x.shape[-1] for x in self._like]
        return (self.codec, *dims) if self.coded and not self.apart else None

    def reserve(self) -> None:
        """Reserve entries for the codes of later tokens, as many tokens on both sides, and all places of the rings."""
        if not self.coded:
            super().reserve()
        elif self.room == 0:
            unit = max(self._each)
            slots = -(-(self.used + self._growth()) // unit) * unit
            for name in self.memory:
                self._longer(name, slots // self.tokens_of(name))
            for side in range(2):
                if self.exact[side].shape[2] < self.codec.most_exact:
                    self._lay(side, self.codec.most_exact)
            self._reserved = slots
            self.use(self.used, slots - self.used)

    @property
    def capacity(self) -> int:
        if not self.coded:
            return super().capacity
        return self.first.shape[1] * self._reserved

    @property
    def steps_until_due(self) -> int:
        """The number of single tokens after which keys become codes."""
        return next(n for n in count(1) if self.codec.due(0, self.exact_of(0) + n)) if self.coded else LAST

    def level(self) -> None:
        """Dequantise the tokens that only one side has as codes into its ring, for kernels, from now on."""
        if not self.levelled:
            self.levelled = True
            self._level([0, 0])

    def _level(self, before: list[int]) -> None:
        coded = min(self.in_codes)
        for side in range(2):
            first = max(before[side], coded)
            if first < self.in_codes[side]:
                self._write_ring(side, first, self.dequantised(side, first, self.in_codes[side]).to(self.like.dtype))

    def follow(self, used: int, position: int) -> None:
        """Note tokens that the steps of a table appended from `position` on, and values that they encoded."""
        if used > self.used:
            new = torch.arange(position, position + used - self.used, dtype=torch.int32, device=self.like.device)
            self._append_places(new.expand(*self.like.shape[:2], -1))
            self.use(used, self._reserved - used)
            if self._each[1] == 1:
                self.in_codes = [self.in_codes[0], max(self.in_codes[1], used - self.codec.most_exact)]

    def row_state(self) -> dict[str, Tensor]:
        """What a recorded step has of a levelled layer beside its codes, by name (`CODED`, `RING`)."""
        coded, traced, places = min(self.in_codes), self.codec.traced(self.notes), self.positions
        more, ring = self.codec.most_traced, self.exact[0].shape[2]
        positions = places.new_full((*places.shape[:2], ring + more), -1)
        spans = self._spans(0, coded, self.used)
        for some, part in zip(spans, split(places[:, :, coded:], spans), strict=True):
            positions[:, :, some] = part
        found = {name: F.pad(x, (0, 0, 0, more)) for name, x in zip(RING, self.exact, strict=False)}
        if traced is not None:
            for name, x in zip(RING, traced[:2], strict=False):
                found[name][:, :, ring:] = x
            own = places.gather(-1, traced.slots.long().clamp(min=0))
            positions[:, :, ring:] = own.masked_fill(traced.slots < 0, -1)
        return {CODED: torch.full(places.shape[:2], coded, device=places.device), **found, RING[2]: positions}

    def slot_positions(self) -> Tensor:
        """Positions of the tokens that a recorded step reads from codes, for all slots; -1 for others."""
        if not self.coded:
            return super().slot_positions()
        coded, traced = min(self.in_codes), self.codec.traced(self.notes)
        found = F.pad(self.positions[:, :, :coded], (0, self._reserved - coded + 1), value=-1)
        if traced is not None:
            slots = traced.slots.long()
            found = found.scatter(-1, slots.masked_fill(slots < 0, found.shape[-1] - 1), -1)
        return found[:, :, :-1]


def _side_of(name: str) -> int:
    return SIDES.index(name.partition(" ")[0])

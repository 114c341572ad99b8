"""The layer of codes in groups that later groups extend (KIVI, KC-VC, OTT): codes, and a ring of exact tokens.

Codes of keys, and of values, are entries of a group of tokens or of one, oldest first. The newest tokens are exact in a
ring for each side: token i is in place i % E, so that no token moves when others become codes. Kernels read both sides
from codes up to the same token; a side whose codes reach further has the tokens beyond it dequantised in its ring
(`level`).

Shapes: H KV heads, C tokens, m entries, E places of a ring, n traced tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.code_attention import attend_to_codes, cover, scores_by_block, weighted_by_block
from kvbench.policies.stores.coded_layer import LAST, CodedLayer
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import CODED, RING, form_of
from kvbench.policies.stores.slot_store import SIDES
from kvbench.policies.stores.slots import GROWTH


class RingLayer(CodedLayer):
    """memory: the entries of codes by name, [1,H,m,...]. in_codes: tokens of each side that are codes. exact: the rings
    of keys and values, [1,H,E,D]. places: positions of the tokens, [1,H,C] or longer; None: token i is at position i.
    used: tokens. room: later tokens for whose codes entries are reserved.
    """

    levelled = False

    def __init__(self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        super().__init__(codec, keys, values, statistics, width)
        self._each = form_of(codec, 0, keys.shape[-1]).tokens, form_of(codec, 1, values.shape[-1]).tokens
        self._reserved = 0

    def _take_over(self, tokens: State, evicted: bool) -> None:
        self.in_codes, self.exact = [0, 0], [tokens["keys"], tokens["values"]]
        self.places = tokens["positions"].to(torch.int32) if evicted else None
        self._use(tokens["keys"].shape[2])

    def _flush(self, first: bool) -> None:
        before = self.in_codes
        self.codec.flush(self)
        for side, ring in enumerate(self.exact):
            if first:
                self._lay(side, self.used - self.in_codes[side])  # no view of the prompt
            elif ring.shape[2] > self.codec.most_exact:  # another prompt was exact
                self._lay(side, self.codec.most_exact)
        if first:
            self.places = None if self.places is None else self.places.clone()
            self._add_empty_codes()
        if self.levelled:
            self._level(before)
        self._use(self.used)

    def _use(self, used: int) -> None:
        """Note the number of tokens."""
        self.use(used, max(self._reserved - used, 0))

    # --- codes ------------------------------------------------------------------------------------------------------
    def tokens_of(self, name: str) -> int:
        return self._each[SIDES.index(name.partition(" ")[0])] if self.coded else 1

    def hold(self, side: int, tokens: int, codes: Mapping[str, Tensor]) -> None:
        """Hold the oldest exact tokens of a side as codes."""
        each = self._each[side]
        first, end = self.in_codes[side] // each, (self.in_codes[side] + tokens) // each
        for name, x in codes.items():
            whole = self.memory.get(own := f"{SIDES[side]} {name}")
            if whole is not None and end > whole.shape[2]:
                growth = GROWTH if self._expected is None else min(GROWTH, self._expected)
                whole, self._reserved = self._longer(own, end + growth // each), 0
            if whole is None:
                self.memory[own] = x.contiguous()
            else:
                whole[:, :, first:end] = x
        self.in_codes = [*self.in_codes[:side], end * each, *self.in_codes[side + 1 :]]

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
        """Tokens from `first` on, dequantised from their codes: [1,H,n,D]."""
        each = self._each[side]
        entry = first // each
        x = self._block(side)(slice(entry * each, -(-end // each) * each)).flatten(2, 3)
        return x[:, :, first - entry * each : end - entry * each]

    def _block(self, side: int) -> Callable[[slice], Tensor]:
        """A function of a range of tokens, of whole entries, that dequantises them: [1,H,m,n/m,D]."""
        start, each, dim = SIDES[side] + " ", self._each[side], self._like[side].shape[-1]
        held = {name.removeprefix(start): x for name, x in self.memory.items() if name.startswith(start)}

        def block(some: slice) -> Tensor:
            entries = slice(some.start // each, some.stop // each)
            own = {name: x[:, :, entries] for name, x in held.items()}
            x = self.codec.decode(own, side, some.stop - some.start, dim)
            return x if x.dim() == 5 else x[:, :, None]

        return block

    # --- the rings --------------------------------------------------------------------------------------------------
    def exact_of(self, side: int) -> int:
        """The number of tokens of a side that are not codes."""
        return self.used - self.in_codes[side]

    def oldest(self, side: int, tokens: int) -> Tensor:
        """The first exact tokens of a side, [1,H,n,D]."""
        return self._ring(side, self.in_codes[side], self.in_codes[side] + tokens)

    def _spans(self, side: int, first: int, end: int) -> list[slice]:
        """The places of some tokens in their order: one or two ranges."""
        size = self.exact[side].shape[2]
        if first == end:
            return []
        begin, rest = first % size, first % size + end - first - size
        return [slice(begin, begin + end - first)] if rest <= 0 else [slice(begin, size), slice(0, rest)]

    def _ring(self, side: int, first: int, end: int) -> Tensor:
        parts = [self.exact[side][:, :, some] for some in self._spans(side, first, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) if parts else self.exact[side][:, :, :0]

    def _write_ring(self, side: int, first: int, x: Tensor) -> None:
        """Write tokens [1,H,n,D], the first of which has number `first`, to their places."""
        spans = self._spans(side, first, first + x.shape[2])
        for some, part in zip(spans, x.split([some.stop - some.start for some in spans], dim=2), strict=True):
            self.exact[side][:, :, some] = part

    def _first(self, side: int) -> int:
        """The first token in the ring of a side."""
        return min(self.in_codes) if self.levelled else self.in_codes[side]

    def _lay(self, side: int, size: int) -> None:
        """Give the ring of a side another number of places."""
        first = self._first(side)
        x = self._ring(side, first, self.used)
        ring = x.new_zeros(*x.shape[:2], size, x.shape[3])
        self.exact = [*self.exact[:side], ring, *self.exact[side + 1 :]]
        self._write_ring(side, first, x)

    def _extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        used = self.used + keys.shape[2]
        for side, x in enumerate((keys, values)):
            need, size = used - self.in_codes[side], self.exact[side].shape[2]
            if need > size:
                later = self.codec.most_exact if self._expected is None else need + self._expected
                self._lay(side, max(need, min(self.codec.most_exact, later)))
            self._write_ring(side, self.used, x)
        self._extend_places(positions.to(torch.int32)[:, None].expand(-1, keys.shape[1], -1))
        self._use(used)

    def _extend_places(self, new: Tensor) -> None:
        """Append positions [1,H,n]."""
        if self.places is not None:
            used = self.used + new.shape[2]
            if used > self.places.shape[2]:
                growth = GROWTH if self._expected is None else min(GROWTH, self._expected)
                self.places = F.pad(self.places, (0, used + growth - self.places.shape[2]), value=-1)
            self.places[:, :, self.used : used] = new

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
            unit = max(self._each[side] for side in range(2))
            slots = -(-(self.used + self._growth()) // unit) * unit
            for name in self.memory:
                self._longer(name, slots // self.tokens_of(name))
            for side in range(2):
                if self.exact[side].shape[2] < self.codec.most_exact:
                    self._lay(side, self.codec.most_exact)
            self._reserved = slots
            self._use(self.used)

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
            self._extend_places(new.expand(*self._like[0].shape[:2], -1))
            self._use(used)
            if self._each[1] == 1:
                self.in_codes = [self.in_codes[0], max(self.in_codes[1], used - self.codec.most_exact)]

    def row_state(self) -> dict[str, Tensor]:
        """What a recorded step has of a levelled layer beside its codes, by name (`CODED`, `RING`)."""
        coded, traced, places = min(self.in_codes), self.codec.traced(self.notes), self._places()
        more, ring = self.codec.most_traced, self.exact[0].shape[2]
        positions = places.new_full((*places.shape[:2], ring + more), -1)
        spans = self._spans(0, coded, self.used)
        for some, part in zip(spans, _split(places[:, :, coded:], spans), strict=True):
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
        found = F.pad(self._places()[:, :, :coded], (0, self._reserved - coded + 1), value=-1)
        if traced is not None:
            slots = traced.slots.long()
            found = found.scatter(-1, slots.masked_fill(slots < 0, found.shape[-1] - 1), -1)
        return found[:, :, :-1]

    # --- contents ---------------------------------------------------------------------------------------------------
    def _places(self) -> Tensor:
        if self.places is not None:
            return self.places[:, :, : self.used]
        like = self._like[0]
        return torch.arange(self.used, dtype=torch.int32, device=like.device).expand(*like.shape[:2], -1)

    def _dequantised(self, side: int) -> Tensor:
        x, traced = widen(self._ring(side, self.in_codes[side], self.used)), self.codec.traced(self.notes)
        if self.in_codes[side]:
            x = torch.cat([self.dequantised(side, 0, self.in_codes[side]).to(x.dtype), x], dim=2)
        return (x if traced is None else cover(x, traced[side], traced.slots)).to(self._like[side].dtype)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((self.kind(name.partition(" ")[2]), x) for name, x in self.memory.items())
        yield from (("full precision", x) for x in self.exact)
        yield from self._noted()
        if self.places is not None:
            yield "positions", self.places

    def _spare_nbytes(self) -> int:
        if not self.coded:
            return super()._spare_nbytes()
        spare = 0
        for name, x in self.memory.items():
            entries = self.in_codes[SIDES.index(name.partition(" ")[0])] // self.tokens_of(name)
            spare += x.nbytes // max(x.shape[2], 1) * (x.shape[2] - entries)
        for side, x in enumerate(self.exact):
            spare += x.nbytes // max(x.shape[2], 1) * (x.shape[2] - self.exact_of(side))
        if self.places is not None:
            spare += self.places.nbytes // max(self.places.shape[2], 1) * (self.places.shape[2] - self.used)
        return spare

    # --- attention --------------------------------------------------------------------------------------------------
    def _attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if not any(self.in_codes):
            return None  # all in full precision
        out, _ = attend_to_codes(
            queries, positions, how, self._scores, self._weighted, self._places(), self.codec.traced(self.notes)
        )
        return out.to(queries.dtype)

    def _scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,C] of query rows [1,H,r,D] with the keys."""
        coded, found = self.in_codes[0], list[Tensor]()
        if coded:
            found.append(scores_by_block(rows, coded, self._block(0), self._each[0]))
        for some in self._spans(0, coded, self.used):
            found.append(rows @ self.exact[0][:, :, some].to(rows.dtype).mT)
        return torch.cat(found, dim=-1)

    def _weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the values with weights [1,H,r,C]."""
        coded, found = self.in_codes[1], list[Tensor]()
        if coded:
            found.append(weighted_by_block(weights[..., :coded], self._block(1), self._each[1]))
        spans = self._spans(1, coded, self.used)
        for some, own in zip(spans, _split(weights[..., coded:], spans), strict=True):
            found.append(own @ self.exact[1][:, :, some].to(weights.dtype))
        return sum(found[1:], start=found[0])


def _split(x: Tensor, spans: list[slice]) -> tuple[Tensor, ...]:
    """Parts of x in its last dimension, as long as the spans."""
    return x.split([some.stop - some.start for some in spans], dim=-1) if spans else ()

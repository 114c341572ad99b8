"""Layers whose tokens are exact until the prompt is complete and evicted; then the oldest become codes.

Shapes: H KV heads, C tokens, n some of them, E places of a ring, r query rows per KV head, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.observation import AttentionParams, Memory, Observation, SlotInfo, State
from kvbench.policies.stores.code_attention import attend_to_codes, cover, scores_by_block, weighted_by_block
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.slot_store import SIDES, SlotStore
from kvbench.policies.stores.slots import GROWTH, padded
from kvbench.policies.stores.store import Sizes

LAST = torch.iinfo(torch.int32).max
TAIL_GROWTH = 16  # places of a ring without a bound; most have at most a few hundred tokens


class CodeRun(NamedTuple):
    """Codes of consecutive tokens; block: a range of them, of whole entries of `each` tokens, as [1,H,m,n/m,D]."""

    tokens: int
    each: int
    block: Callable[[slice], Tensor]


class CodedLayer(SlotStore):
    """Slots of exact tokens until the first `settle`, then codes, and the exact tokens of each side in a ring.

    used: tokens. in_codes: of these, how many are codes, of keys and of values. exact: rings [1,H,E,D] of keys and of
    values, in which token i has place i % E, so that none moves when others become codes. places: positions of the
    tokens, [1,H,C] or longer; None: token i is at position i. notes: data of the codec, [1,H,...] by name. prompt: its
    length, if it was observed. before: tokens at the end of the last step. apart: layers of single KV heads, if these
    hold different numbers of tokens; views are then copies, in which shorter heads end in empty slots.
    """

    prompt = before = 0

    def __init__(self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        super().__init__(keys, values, (*statistics, *codec.statistics), width)
        self.codec, self.coded = codec, False
        self.apart: list[CodedLayer] = []
        self.notes: Memory = {}
        self.places: Tensor | None = None
        self._like = (keys[:, :, :0].clone(), values[:, :, :0].clone())  # for dtype and shape

    # --- what a subclass defines -----------------------------------------------------------------------------------
    @abstractmethod
    def hold(self, side: int, tokens: int, codes: Mapping[str, Tensor], again: bool = False) -> None:
        """Hold the oldest exact tokens of a side as codes; again: the codes are those of all earlier tokens as well."""

    @abstractmethod
    def codes_of(self, side: int) -> Mapping[str, Tensor]:
        """The last codes that a side holds, by name."""

    @abstractmethod
    def _runs(self, side: int) -> Iterator[CodeRun]:
        """All codes of a side."""

    @abstractmethod
    def _codes(self) -> Iterator[tuple[str, Tensor, int]]:
        """The name of each tensor of codes, and the number of its entries that are in use."""

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self._side(0)

    @property
    def values(self) -> Tensor:
        return self._side(1)

    def _side(self, side: int) -> Tensor:
        if self.apart:
            return _joined([part._side(side) for part in self.apart])
        if not self.coded:
            return self._view(SIDES[side])
        x, traced = self.view(side), self.codec.traced(self.notes)
        return (x if traced is None else cover(x, traced[side], traced.slots)).to(self.like.dtype)

    def view(self, side: int) -> Tensor:
        """[1,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        exact = widen(self._ring(side, self.in_codes[side], self.used))
        held = [run.block(slice(0, run.tokens)).flatten(2, 3).to(exact.dtype) for run in self._runs(side)]
        return torch.cat([*held, exact], dim=2)

    @property
    def positions(self) -> Tensor:
        if self.apart:
            return _joined([part.positions for part in self.apart], fill=-1)
        if not self.coded:
            return super().positions
        if self.places is not None:
            return self.places[:, :, : self.used]
        return torch.arange(self.used, dtype=torch.int32, device=self.like.device).expand(*self.like.shape[:2], -1)

    @property
    def state(self) -> State:
        return {} if self.coded else {name: x for name, x in super().state.items() if name not in self.codec.statistics}

    @state.setter
    def state(self, state: State) -> None:
        """Nothing to do: the statistics of `state` are views."""

    @property
    def slots(self) -> SlotInfo:
        return SlotInfo(packed=not self.apart) if self.coded else super().slots

    @property
    def step_format(self) -> tuple[object, ...] | None:
        return None

    @property
    def like(self) -> Tensor:
        return self._like[0]

    # --- bytes -----------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        if self.apart:
            return sum(part.nbytes for part in self.apart)
        return sum(x.nbytes for _, x, _ in self._tensors())

    def sizes(self) -> Sizes:
        kinds, spare = Counter({"full precision": 0, "positions": 0}), 0
        kinds.update(dict.fromkeys(("codes", "scales and minima") if self.coded else (), 0))
        for part in self.apart:
            own = part.sizes()
            kinds.update(own.kinds)
            spare += own.spare
        for kind, x, used in () if self.apart else self._tensors():
            kinds[kind] += x.nbytes
            spare += 0 if used < 0 else x.nbytes // max(x.shape[2], 1) * (x.shape[2] - used)
        return Sizes(dict(kinds), spare if self.coded else self._spare_nbytes())

    def _tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Each tensor with its kind and the number of its entries, in dimension 2, that are in use; -1: all."""
        kinds = self.codec.kinds
        yield from ((kinds.get(name, "scales and minima"), x, -1) for name, x in self.notes.items())
        if self.coded:
            yield from ((kinds.get(name, "scales and minima"), x, used) for name, x, used in self._codes())
            yield from (("full precision", x, self.exact_of(side)) for side, x in enumerate(self.exact))
            yield from () if self.places is None else [("positions", self.places, self.used)]
        else:
            yield from (("full precision", x, -1) for x in (*self.memory.values(), self.free) if x is not None)

    def expect(self, tokens: int) -> None:
        super().expect(tokens)
        for part in self.apart:
            part.expect(tokens)

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if not self.coded:
            super().append(keys, values, positions)
        elif self.apart:
            for part, x, y in zip(self.apart, keys.split(1, dim=1), values.split(1, dim=1), strict=True):
                part.append(x, y, positions)
        else:
            self._append_places(positions.to(torch.int32)[:, None].expand(-1, keys.shape[1], -1))
            new = keys.shape[2]
            for side, x in enumerate((keys, values)):
                need = self.exact_of(side) + new
                if need > self.exact[side].shape[2]:
                    most = self.codec.most_exact or need + TAIL_GROWTH - new
                    later = LAST if self._expected is None else need + self._expected
                    self._lay(side, max(need, min(most, later)))
                self._write_ring(side, self.used, x)
            self.use(self.used + new, max(self.room - new, 0))

    def _append_places(self, new: Tensor) -> None:
        """Append positions [1,H,n]."""
        if self.places is not None:
            used = self.used + new.shape[2]
            if used > self.places.shape[2]:
                growth = GROWTH if self._expected is None else min(GROWTH, self._expected)
                self.places = F.pad(self.places, (0, used + growth - self.places.shape[2]), value=-1)
            self.places[:, :, self.used : used] = new

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        assert not self.coded, "tokens in quantised groups cannot be evicted one by one"
        return super().keep(mask, spare, count)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        assert not self.coded, "tokens in quantised groups cannot be changed one by one"
        super().write(slots, keys, values)

    @property
    def watching(self) -> bool:
        return self.codec.watches and not self.coded

    def observe(self, observation: Observation, prompt: int) -> None:
        self.prompt = prompt
        self.codec.observe(self.notes, super().state, observation, prompt)

    def settle(self) -> None:
        first = not self.coded
        if first:
            self._begin()
        for part in self.apart:
            part.settle()
        if not self.apart:
            self._flush(first)

    def _begin(self) -> None:
        """Put the tokens in order of position, and each KV head apart if they differ in length."""
        tokens, packed = self.contents(), self.slots.packed
        if not (packed and self.slots.ascending):
            counts = (tokens["positions"] >= 0).sum(-1).flatten().tolist()
            positions = tokens["positions"].masked_fill(tokens["positions"] < 0, LAST)
            order = positions.argsort(dim=-1, stable=True)[..., : max(counts)]
            tokens = {name: take(x, order) for name, x in tokens.items()}
            if min(counts) < max(counts):
                self.apart = [self._of_head(head, count, tokens) for head, count in enumerate(counts)]
        if not self.apart:
            self.notes |= {name: tokens[name] for name in self.codec.statistics}
            self.in_codes, self.exact = [0, 0], [tokens["keys"], tokens["values"]]
            self.places = None if self._whole else tokens["positions"].to(torch.int32, copy=True)
            self.use(tokens["keys"].shape[2], 0)
        self.coded, self.memory, self.free, self.lent, self._statistics = True, {}, None, False, ()
        self._packed = self._ascending = True

    def _of_head(self, head: int, count: int, tokens: State) -> CodedLayer:
        """A layer of the first `count` tokens of one KV head, exact as yet."""
        own = {name: x[:, head : head + 1, :count] for name, x in tokens.items()}
        part = type(self)(self.codec, own["keys"], own["values"], (), 1)
        part.memory, part.prompt, part._whole, part._expected = own, self.prompt, False, self._expected
        part.notes = {name: x[:, head : head + 1].clone() for name, x in self.notes.items()}
        part.use(count, 0)
        return part

    def _flush(self, first: bool) -> None:
        """Code the tokens that are due; first: the whole prompt is exact."""
        before, most = self.in_codes, self.codec.most_exact
        self.codec.flush(self, first)
        self.before = self.used
        for side, ring in enumerate(self.exact):
            if first:
                self._lay(side, self.exact_of(side))  # no view of the prompt
            elif ring.shape[2] > most and before[side] != self.in_codes[side]:
                self._lay(side, max(most, self.exact_of(side)))

    # --- the rings --------------------------------------------------------------------------------------------------
    def exact_of(self, side: int) -> int:
        """The number of tokens of a side that are not codes."""
        return self.used - self.in_codes[side]

    def oldest(self, side: int, tokens: int) -> Tensor:
        """The first exact tokens of a side, [1,H,n,D]."""
        return self._ring(side, self.in_codes[side], self.in_codes[side] + tokens)

    def _became_codes(self, side: int, tokens: int) -> None:
        self.in_codes = [*self.in_codes[:side], self.in_codes[side] + tokens, *self.in_codes[side + 1 :]]

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
        for some, part in zip(spans, split(x, spans, dim=2), strict=True):
            self.exact[side][:, :, some] = part

    def _lay(self, side: int, size: int) -> None:
        """Give the ring of a side another number of places."""
        first = self.in_codes[side]
        x = self._ring(side, first, self.used)
        ring = x.new_zeros(*x.shape[:2], size, x.shape[3])
        self.exact = [*self.exact[:side], ring, *self.exact[side + 1 :]]
        self._write_ring(side, first, x)

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self.apart:
            outs, count = list[Tensor | None](), len(self.apart)
            for head, (part, rows) in enumerate(zip(self.apart, queries.chunk(count, dim=1), strict=True)):
                own = how if how.sinks is None else how._replace(sinks=how.sinks.chunk(count, dim=1)[head])
                outs.append(part.attend(rows, positions, own))
            found = [out for out in outs if out is not None]
            return torch.cat(found, dim=1) if len(found) == count else None
        if not self.coded or not any(self.in_codes):
            return None  # all in full precision
        traced = self.codec.traced(self.notes)
        call = queries, positions, how, self._scores, self._weighted, self.positions, traced
        out, weights = attend_to_codes(*call)
        self.codec.attended(self, weights, positions)
        return out.to(queries.dtype)

    def _scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,C] of query rows [1,H,r,D] with the keys."""
        found = [scores_by_block(rows, run.tokens, run.block, run.each) for run in self._runs(0)]
        for some in self._spans(0, self.in_codes[0], self.used):
            found.append(rows @ self.exact[0][:, :, some].to(rows.dtype).mT)
        return torch.cat(found, dim=-1)

    def _weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the values with weights [1,H,r,C]."""
        coded, spans, sums, first = self.in_codes[1], self._spans(1, self.in_codes[1], self.used), list[Tensor](), 0
        for run in self._runs(1):
            sums.append(weighted_by_block(weights[..., first : first + run.tokens], run.block, run.each))
            first += run.tokens
        for some, own in zip(spans, split(weights[..., coded:], spans), strict=True):
            sums.append(own @ self.exact[1][:, :, some].to(weights.dtype))
        return sum(sums[1:], start=sums[0])


def split(x: Tensor, spans: list[slice], dim: int = -1) -> tuple[Tensor, ...]:
    """Parts of x that are as long as the spans."""
    return x.split([some.stop - some.start for some in spans], dim) if spans else ()


def _joined(heads: list[Tensor], fill: int = 0) -> Tensor:
    """Views of single KV heads as one of all, [1,H,C,...]; shorter ones end with `fill`."""
    return padded(heads, fill).transpose(0, 1)

"""Layers whose tokens are exact until the prompt is complete and evicted, then codes and an exact tail.

Shapes: H KV heads, C tokens of the longest head, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Memory, Observation, SlotInfo, State
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.slot_store import SIDES, SlotStore
from kvbench.policies.stores.slots import padded, take
from kvbench.policies.stores.store import Sizes

LAST = torch.iinfo(torch.int32).max


class CodedLayer(SlotStore):
    """Slots of exact tokens until the first `settle`, then what a subclass makes of the tokens in order of position.

    apart: layers of single KV heads, if these hold different numbers of tokens; views are then copies, in which shorter
    heads end in empty slots. notes: data of the codec, [1,H,...] by name. prompt: its length, if it was observed.
    """

    prompt = 0

    def __init__(self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        super().__init__(keys, values, (*statistics, *codec.statistics), width)
        self.codec, self.coded = codec, False
        self.apart: list[CodedLayer] = []
        self.notes: Memory = {}
        self._like = (keys[:, :, :0].clone(), values[:, :, :0].clone())  # for dtype and shape

    # --- what a subclass defines -----------------------------------------------------------------------------------
    @abstractmethod
    def _take_over(self, tokens: State, evicted: bool) -> None:
        """Hold exact tokens [1,H,C,...] by name in their final form; evicted: the i-th one may not be at position i."""

    @abstractmethod
    def _flush(self, first: bool) -> None:
        """Code the tokens that are due; first: the whole prompt is exact."""

    @abstractmethod
    def _extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Append exact tokens."""

    @abstractmethod
    def _dequantised(self, side: int) -> Tensor:
        """The keys (side 0) or values (1) in the model's dtype, [1,H,C,D]."""

    @abstractmethod
    def _places(self) -> Tensor:
        """Positions of the tokens, [1,H,C] int32."""

    @abstractmethod
    def _attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """`attend` over codes and the exact tail."""

    @abstractmethod
    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, each with its kind in tables of bytes."""

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
        return self._dequantised(side) if self.coded else self._view(SIDES[side])

    @property
    def positions(self) -> Tensor:
        if self.apart:
            return _joined([part.positions for part in self.apart], fill=-1)
        return self._places() if self.coded else super().positions

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
        if self.coded:
            return sum(x.nbytes for _, x in self._tensors())
        return super().nbytes + sum(x.nbytes for x in self.notes.values())

    def sizes(self) -> Sizes:
        if self.apart:
            sizes = [part.sizes() for part in self.apart]
            return Sizes(dict(sum((Counter(one.kinds) for one in sizes), Counter())), sum(one.spare for one in sizes))
        kinds = Counter({"full precision": 0, "positions": 0})
        if not self.coded:
            kinds["full precision"] += super().nbytes
        kinds.update(dict.fromkeys(("codes", "scales and minima") if self.coded else (), 0))
        for kind, x in self._tensors() if self.coded else self._noted():
            kinds[kind] += x.nbytes
        return Sizes(dict(kinds), self._spare_nbytes())

    def _noted(self) -> Iterator[tuple[str, Tensor]]:
        return ((self.kind(name), x) for name, x in self.notes.items())

    def kind(self, name: str) -> str:
        """The kind of a tensor of the codec."""
        return self.codec.kinds.get(name, "scales and minima")

    def expect(self, tokens: int) -> None:
        super().expect(tokens)
        for part in self.apart:
            part.expect(tokens)

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for part, x, y in zip(self.apart, keys.split(1, dim=1), values.split(1, dim=1), strict=False):
            part.append(x, y, positions)
        if not self.apart:
            (self._extend if self.coded else super().append)(keys, values, positions)

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
        tokens, positions = self.contents(), self.positions
        own = {name: tokens[name] for name in self.codec.statistics}
        if not (self.slots.packed and self.slots.ascending):
            counts = (positions >= 0).sum(-1).flatten().tolist()
            order = positions.masked_fill(positions < 0, LAST).argsort(dim=-1, stable=True)[..., : max(counts)]
            tokens = {name: take(x, order) for name, x in tokens.items()}
            if min(counts) < max(counts):
                self.apart = [self._of_head(head, count, tokens) for head, count in enumerate(counts)]
            own = {name: tokens[name] for name in self.codec.statistics}
        self.coded, self.memory, self.free, self.lent = True, {}, None, False
        self._statistics, self._packed, self._ascending = (), True, True
        if not self.apart:
            self.notes |= own
            self._take_over(tokens, evicted=not self._whole)

    def _of_head(self, head: int, count: int, tokens: State) -> CodedLayer:
        """A layer of the first `count` tokens of one KV head, exact as yet."""
        own = {name: x[:, head : head + 1, :count] for name, x in tokens.items()}
        part = type(self)(self.codec, own["keys"], own["values"], (), 1)
        part.memory, part.prompt, part._whole, part._expected = own, self.prompt, False, self._expected
        part.notes = {name: x[:, head : head + 1].clone() for name, x in self.notes.items()}
        part.use(count, 0)
        return part

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if not self.coded:
            return None
        if not self.apart:
            return self._attend(queries, positions, how)
        outs, count = [], len(self.apart)
        for head, (part, rows) in enumerate(zip(self.apart, queries.chunk(count, dim=1), strict=True)):
            own = how if how.sinks is None else how._replace(sinks=how.sinks.chunk(count, dim=1)[head])
            outs.append(part._attend(rows, positions, own))
        found = [out for out in outs if out is not None]
        return torch.cat(found, dim=1) if len(found) == count else None


def _joined(heads: list[Tensor], fill: int = 0) -> Tensor:
    """Views of single KV heads as one of all, [1,H,C,...]; shorter ones end with `fill`."""
    return padded(heads, fill).transpose(0, 1)

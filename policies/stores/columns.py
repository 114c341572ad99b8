"""Columns, the keys and the values of KV heads: runs of codes, then a tail in full precision.

Shapes: H KV heads, r query rows per KV head, n entries (tokens or groups of tokens), C tokens, D head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.observation import Memory
from kvbench.policies.stores.code_attention import Outliers, cover, scores_by_block, weighted_by_block
from kvbench.policies.stores.slots import GROWTH

TAIL_GROWTH = 16  # slots; a tail is at most a few hundred tokens long, so moving it this often costs nothing

Decoder = Callable[[Mapping[str, Tensor], int], Tensor]
"""The tokens [1,H,m,n/m,D], in m groups or in one, of codes and of their number n."""


@dataclass
class Room:
    """Where the `count` entries of a queue are: from `start` on, of `capacity` that grows by `growth` entries."""

    growth: int
    count: int = 0
    start: int = 0
    capacity: int = 0

    def enter(self, entries: int) -> bool:
        """Count more entries; whether they need another capacity, in which all entries start at 0."""
        moves = self.start + self.count + entries > self.capacity
        if moves:
            self.start, self.capacity = 0, self.count + max(entries, self.growth)
        self.count += entries
        return moves

    def leave(self, entries: int) -> bool:
        """Count the oldest entries as gone; whether none is left, which frees the capacity."""
        self.start += entries
        self.count -= entries
        if self.count == 0:
            self.start = self.capacity = 0
        return self.count == 0


class Queue:
    """Tensors [1,H,capacity,...] by name that share their entries, oldest first.

    The first entries are stored without a copy; later, capacity is reserved for `growth` entries at a time.
    """

    def __init__(self, growth: int) -> None:
        self.room = Room(growth)
        self.tensors: dict[str, Tensor] = {}

    @classmethod
    def of(cls, entries: Mapping[str, Tensor], room: Room) -> Self:
        """A queue of entries [1,H,count,...] with the capacity of `room`."""
        queue = cls(room.growth)
        queue.room = room
        queue.tensors = queue._reserved(entries)
        return queue

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.room.count

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, unused capacity included."""
        return sum(x.nbytes for x in self.tensors.values())

    @property
    def spare_nbytes(self) -> int:
        """Bytes of the unused capacity."""
        return self.nbytes // max(self.room.capacity, 1) * (self.room.capacity - self.count)

    def expect(self, entries: int) -> None:
        """Reserve capacity for no more than this number of later entries at a time."""
        self.room.growth = min(self.room.growth, entries)

    def view(self, name: str) -> Tensor:
        """[1,H,count,...]."""
        return self.some(0, self.count)[name]

    def some(self, first: int, end: int) -> dict[str, Tensor]:
        """Entries from `first` to `end` by name; if that is all, tensors of any shape."""
        if (first, end) == (0, self.room.capacity):
            return self.tensors
        start = self.room.start
        return {name: x[:, :, start + first : start + end] for name, x in self.tensors.items()}

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Append entries [1,H,n,...] by name."""
        entering = next(iter(new.values())).shape[2]
        if not self.tensors:
            self.tensors, self.room = dict(new), Room(self.room.growth, entering, 0, entering)
            return
        before = self.some(0, self.count)
        if self.room.enter(entering):
            self.tensors = self._reserved(before)
        end = self.room.start + self.count
        for name, x in new.items():
            self.tensors[name][:, :, end - entering : end] = x

    def drop(self, count: int) -> None:
        """Remove the oldest entries."""
        if self.room.leave(count):
            self.tensors = {name: x[:, :, :0].clone() for name, x in self.tensors.items()}

    def compact(self) -> None:
        """Copy the entries, which frees unused capacity and larger tensors that they are views of."""
        held, copied = self.some(0, self.count), torch.contiguous_format
        self.tensors = {name: x.clone(memory_format=copied) for name, x in held.items()}
        self.room.start, self.room.capacity = 0, self.count

    def _reserved(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors of the capacity, with these entries at their place."""
        longer = {}
        for name, x in entries.items():
            longer[name] = x.new_zeros(*x.shape[:2], self.room.capacity, *x.shape[3:])
            longer[name][:, :, self.room.start : self.room.start + x.shape[2]] = x
        return longer


class Run(NamedTuple):
    """Codes of consecutive tokens."""

    codes: Queue
    tokens: int


class Column:
    """Tokens, oldest first: runs of codes, then the exact tail.

    decode: of the codes. growth: entries that a run reserves at once, if later codes extend it; None: every run is
    complete, and its tensors may have any shape.
    """

    def __init__(self, decode: Decoder, growth: int | None) -> None:
        self.runs: list[Run] = []
        self.tail = Queue(TAIL_GROWTH)
        self._decode, self._growth = decode, growth

    @property
    def coded(self) -> int:
        """The number of tokens that are held as codes."""
        return sum(run.tokens for run in self.runs)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.coded + self.tail.count

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.tail.tensors["x"].dtype

    @property
    def queues(self) -> list[Queue]:
        """All tensors."""
        return [self.tail, *(run.codes for run in self.runs)]

    def expect(self, tokens: int) -> None:
        """Reserve capacity for no more than this number of later tokens."""
        self._growth = None if self._growth is None else min(self._growth, tokens)
        for queue in self.queues:
            queue.expect(tokens)

    def append(self, x: Tensor) -> None:
        """Append exact tokens [1,H,n,D]."""
        self.tail.append({"x": x})

    def oldest(self, count: int) -> Tensor:
        """The first `count` tokens of the tail, [1,H,count,D]."""
        return self.tail.some(0, count)["x"]

    def hold(self, count: int, codes: Mapping[str, Tensor], again: bool = False) -> None:
        """Hold the tail's first `count` tokens as codes; again: the codes are those of all earlier tokens as well."""
        if self._growth is not None and self.runs:
            run = self.runs[0]
            run.codes.append(codes)
            self.runs = [Run(run.codes, run.tokens + count)]
        else:
            before = self.coded if again else 0
            queue = Queue(self._growth or 1)
            queue.append(codes)
            self.runs = [*(() if again else self.runs), Run(queue, before + count)]
        self.tail.drop(count)

    # --- contents --------------------------------------------------------------------------------------------------
    def view(self) -> Tensor:
        """[1,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        tail = widen(self.tail.view("x"))
        runs = [self._decode(run.codes.some(0, run.codes.count), run.tokens) for run in self.runs if run.tokens]
        return torch.cat([*(x.flatten(2, 3).to(tail.dtype) for x in runs), tail], dim=2)

    def after(self, first: int) -> Tensor:
        """The tokens from number `first` on in the model's dtype, [1,H,n,D], if a run that grows has all codes."""
        (run,), tail = self.runs, self.tail.view("x")
        if first >= run.tokens:
            return tail[:, :, first - run.tokens :]
        entry = first // (each := run.tokens // run.codes.count)
        x = self._decode(run.codes.some(entry, run.codes.count), run.tokens - entry * each).flatten(2, 3)
        return torch.cat([x[:, :, first - entry * each :].to(tail.dtype), tail], dim=2)

    def scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,C] of query rows [1,H,r,D] with the tokens."""
        found = [scores_by_block(rows, run.tokens, *self._blocks(run)) for run in self.runs if run.tokens]
        return torch.cat([*found, rows @ self.tail.view("x").to(rows.dtype).mT], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the tokens with weights [1,H,r,C]."""
        runs = [run for run in self.runs if run.tokens]
        *coded, exact = weights.split([*(run.tokens for run in runs), self.tail.count], dim=-1)
        sums: Tensor = exact @ self.tail.view("x").to(weights.dtype)
        for run, own in zip(runs, coded, strict=True):
            sums += weighted_by_block(own, *self._blocks(run))
        return sums

    def _blocks(self, run: Run) -> tuple[Callable[[slice], Tensor], int]:
        """A function of a range of tokens that decodes them, [1,H,m,n/m,D], and the tokens of an entry."""
        codes, tokens = run
        each = tokens if self._growth is None else tokens // codes.count

        def block(some: slice) -> Tensor:
            entries = (0, codes.count) if self._growth is None else (some.start // each, some.stop // each)
            return self._decode(codes.some(*entries), some.stop - some.start)

        return block, each


class Columns:
    """Keys and values of KV heads with equally many tokens: slot i of a head holds its i-th token.

    memory: data of the codec, [1,H,...] by name. places: positions, empty if the i-th token is at position i. prompt:
    its length, if it was observed. before: tokens at the end of the last step.
    """

    before = 0

    def __init__(self, columns: tuple[Column, Column], memory: Memory, prompt: int) -> None:
        self.columns, self.memory, self.prompt = columns, memory, prompt
        self.places = Queue(GROWTH)

    @property
    def queues(self) -> list[Queue]:
        """All tensors, beside those of the codec."""
        return [self.places, *(queue for column in self.columns for queue in column.queues)]

    @property
    def coded(self) -> bool:
        """Whether some tokens are held as codes."""
        return any(column.coded for column in self.columns)

    def expect(self, tokens: int) -> None:
        """Reserve capacity for no more than this number of later tokens."""
        self.places.expect(tokens)
        for column in self.columns:
            column.expect(tokens)

    @property
    def positions(self) -> Tensor:
        """[1,H,C] int32."""
        if self.places.tensors:
            return self.places.view("positions")
        tail = self.columns[0].tail.view("x")
        return torch.arange(self.columns[0].tokens, dtype=torch.int32, device=tail.device).expand(*tail.shape[:2], -1)

    def view(self, side: int, exact: Outliers | None) -> Tensor:
        """The keys (side 0) or values (1) in the model's dtype, [1,H,C,D]; exact: tokens that replace some of them."""
        x = self.columns[side].view()
        x = x if exact is None else cover(x, exact[side], exact.slots)
        return x.to(self.columns[side].dtype)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Append exact tokens [1,H,n,D] at positions [1,1 or H,n]."""
        for column, x in zip(self.columns, (keys, values), strict=True):
            column.append(x)
        if self.places.tensors:
            self.places.append({"positions": positions.to(torch.int32).expand(-1, keys.shape[1], -1)})

    def compact(self) -> None:
        """Copy the exact tokens, which are views of a whole prompt at first."""
        for queue in (self.places, *(column.tail for column in self.columns)):
            queue.compact()

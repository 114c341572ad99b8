"""A column, the keys or the values of one layer: chunks of codes, then a tail in full precision.

Shapes: H KV heads, r query rows per KV head, N tokens of a chunk, C of a column, D head dim, G tokens or channels
of a group.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.constants import on_host
from kvbench.policies.stores.code_attention import scores_by_block, weighted_by_block
from kvbench.policies.stores.quantiser import WORD, Group, Quantiser
from kvbench.policies.stores.queue import Queue


class Chunk(ABC):
    """Consecutive tokens of a column in one format."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of tokens."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """[1,H,N,D] float32, in order."""

    @abstractmethod
    def scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,N] of query rows [1,H,r,D] with the tokens, which are keys."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the tokens, which are values, with weights [1,H,r,N]."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by kind."""


class Codes(Chunk):
    """A growing chunk of coded tokens, some of which can be decoded alone.

    unit: the number of tokens that are decoded together.
    """

    unit = 1

    def __init__(self, growth: int = 1) -> None:
        self.queue = Queue(growth)

    @property
    def tokens(self) -> int:
        return self.queue.count

    @abstractmethod
    def encode(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The codes [1,H,N',...] by name of tokens x [1,H,n,D] of a model in `dtype`."""

    @abstractmethod
    def decode(self, some: slice) -> Tensor:
        """Some of the tokens, in order, as m groups of n: [1,H,m,n,D] float32.

        The start and the stop are multiples of `unit`, or the end.
        """

    def append(self, x: Tensor, dtype: torch.dtype) -> Self:
        """Code x [1,H,n,D] of a model in `dtype`."""
        self.queue.append(self.encode(x, dtype))
        return self

    def dequantised(self) -> Tensor:
        return self.decode(slice(0, self.tokens)).flatten(2, 3)

    def scores(self, rows: Tensor) -> Tensor:
        return scores_by_block(rows, self.tokens, self.decode, self.unit)

    def weighted(self, weights: Tensor) -> Tensor:
        return weighted_by_block(weights, self.decode, self.unit)

    def sizes(self) -> dict[str, int]:
        return {"codes": self.queue.nbytes("words"), "scales and minima": self.queue.nbytes("scale", "minimum")}


class Exact(Codes):
    """Tokens in full precision."""

    def encode(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"x": x.clone(memory_format=torch.contiguous_format)}

    def decode(self, some: slice) -> Tensor:
        return widen(self.queue.view("x")[:, :, None, some])

    def sizes(self) -> dict[str, int]:
        return {"full precision": self.queue.nbytes()}


class ChannelCodes(Codes):
    """Groups of `group` consecutive tokens, each channel with its own scale: words [1,H,N/G,D,W], scale [1,H,N/G,D]."""

    def __init__(self, quantiser: Quantiser, group: int) -> None:
        super().__init__()
        self.quantiser, self.group = quantiser, group

    @property
    def tokens(self) -> int:
        return self.queue.count * self.group

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Whole groups, or words of the codes of a single group, which may be long."""
        return WORD if self.queue.count == 1 else self.group

    def encode(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.quantiser.quantise(x.unflatten(2, (-1, self.group)).mT, dtype)._asdict()

    def decode(self, some: slice) -> Tensor:
        words, scale, minimum = map(self.queue.view, Group._fields)
        count, each = self.group, WORD // self.quantiser.bits
        if self.queue.count == 1:
            words, count = words[..., some.start // each : -(-some.stop // each)], some.stop - some.start
        else:
            words, scale, minimum = (x[:, :, some.start // count : some.stop // count] for x in (words, scale, minimum))
        return self.quantiser.dequantise(Group(words, scale, minimum), count).mT


class TokenCodes(Codes):
    """Tokens one by one, each in groups of G channels: words [1,H,N,D/G,W], scale and minimum [1,H,N,D/G].

    heads: a group spans a token's channels of this many heads, [1,1,N,H*D/G,...]; None: every head has its own groups.
    """

    def __init__(self, quantiser: Quantiser, group: int, growth: int = 1, heads: int | None = None) -> None:
        super().__init__(growth)
        self.quantiser, self.group, self.heads = quantiser, group, heads

    def encode(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.heads is not None:
            x = x.transpose(1, 2).flatten(2)[:, None]
        check = x.shape[2] > 1 or on_host(x)  # while decoding, the host would wait for a GPU at every token
        return self.quantiser.quantise(x.unflatten(3, (-1, self.group)), dtype, check)._asdict()

    def decode(self, some: slice) -> Tensor:
        held = Group(*(self.queue.view(name)[:, :, some] for name in Group._fields))
        x = self.quantiser.dequantise(held, self.group).flatten(-2)
        x = x if self.heads is None else x[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return x[:, :, None]


TAIL_GROWTH = 16  # slots; a tail is at most a few hundred tokens long, so moving it this often costs nothing


class Column:
    """Tokens, oldest first: codes, then the exact tail."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.tail = Queue(TAIL_GROWTH)
        self._expected: int | None = None

    @property
    def coded(self) -> int:
        """The number of tokens that are held as codes."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.coded + self.tail.count

    @property
    def queues(self) -> list[Queue]:
        """All queues that grow while decoding."""
        return [self.tail, *(chunk.queue for chunk in self.chunks if isinstance(chunk, Codes))]

    def expect(self, tokens: int) -> None:
        """Reserve capacity for no more than this number of later tokens."""
        self._expected = tokens if self._expected is None else min(self._expected, tokens)
        for queue in self.queues:
            queue.expect(tokens)

    def encode(self, count: int, x: Tensor, start: Callable[[Tensor], Codes], grows: bool = True) -> None:
        """Code the tail's first `count` tokens, as `x` [1,H,count,D].

        start: makes the chunk that they enter, unless the newest one `grows`.
        """
        if not (self.chunks and grows):
            self.chunks.append(first := start(x))
            if self._expected is not None:
                first.queue.expect(self._expected)
        codes = self.chunks[-1]
        assert isinstance(codes, Codes)
        codes.append(x, self.tail.view("x").dtype)
        self.tail.drop(count)

    def replace_chunks(self, chunks: Sequence[Chunk], count: int) -> None:
        """Hold these chunks instead, which include the tail's first `count` tokens."""
        self.chunks = list(chunks)
        self.tail.drop(count)

    def scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,C] of query rows [1,H,r,D] with the tokens."""
        found = [chunk.scores(rows) for chunk in self.chunks if chunk.tokens]
        return torch.cat([*found, rows @ self.tail.view("x").to(rows.dtype).mT], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the tokens with weights [1,H,r,C]."""
        chunks = [chunk for chunk in self.chunks if chunk.tokens]
        *coded, exact = weights.split([*(chunk.tokens for chunk in chunks), self.tail.count], dim=-1)
        sums: Tensor = exact @ self.tail.view("x").to(weights.dtype)
        for chunk, own in zip(chunks, coded, strict=True):
            sums += chunk.weighted(own)
        return sums

    def view(self) -> Tensor:
        """[1,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        chunks = [chunk.dequantised() for chunk in self.chunks if chunk.tokens]
        tail = widen(self.tail.view("x"))
        return torch.cat([*(x.to(tail.dtype) for x in chunks), tail], dim=2)

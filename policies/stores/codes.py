"""A column, the keys or the values of one layer: chunks of codes, then a tail in full precision.

Shapes: B batch, H KV heads, r query rows per KV head, N tokens of a chunk, C of a column, D head dim, G tokens (or
channels) of a group.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
        """[B,H,N,D] float32, in order."""

    @abstractmethod
    def scores(self, rows: Tensor) -> Tensor:
        """Products [B,H,r,N] of query rows [B,H,r,D] with the tokens, which are keys."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [B,H,r,D] of the tokens, which are values, with weights [B,H,r,N]."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by kind."""


class BlockChunk(Chunk):
    """A chunk of which some tokens can be dequantised alone."""

    @property
    def unit(self) -> int:
        """The number of tokens that are dequantised together."""
        return 1

    @abstractmethod
    def block(self, some: slice) -> Tensor:
        """Some of the tokens, in order, as m groups of n: [B,H,m,n,D] float32.

        The start and the stop are multiples of `unit`, or the end.
        """

    def dequantised(self) -> Tensor:
        return self.block(slice(0, self.tokens)).flatten(2, 3)

    def scores(self, rows: Tensor) -> Tensor:
        return scores_by_block(rows, self.tokens, self.block, self.unit)

    def weighted(self, weights: Tensor) -> Tensor:
        return weighted_by_block(weights, self.block, self.unit)


class Exact(BlockChunk):
    """Tokens x [B,H,N,D] in full precision."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.clone(memory_format=torch.contiguous_format)

    @property
    def tokens(self) -> int:
        return self._x.shape[2]

    def block(self, some: slice) -> Tensor:
        return widen(self._x[:, :, None, some])

    def sizes(self) -> dict[str, int]:
        return {"full precision": self._x.nbytes}


class Codes(BlockChunk):
    """A growing chunk of coded tokens."""

    def __init__(self, growth: int) -> None:
        self.queue = Queue(growth)

    @property
    def tokens(self) -> int:
        return self.queue.count

    @abstractmethod
    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        """Code x [B,H,n,D] of a model in `dtype`."""


class GroupCodes(Codes):
    """Codes of a quantiser, with a scale and a minimum for each group of numbers."""

    def __init__(self, quantiser: Quantiser, growth: int) -> None:
        super().__init__(growth)
        self.quantiser = quantiser

    def sizes(self) -> dict[str, int]:
        return {"codes": self.queue.nbytes("words"), "scales and minima": self.queue.nbytes("scale", "minimum")}

    def _append(self, groups: Tensor, dtype: torch.dtype, check: bool = True) -> None:
        self.queue.append(self.quantiser.quantise(groups, dtype, check)._asdict())


class ChannelCodes(GroupCodes):
    """Groups of `group` consecutive tokens, each channel with its own scale: words [B,H,N/G,D,W], scale [B,H,N/G,D]."""

    def __init__(self, quantiser: Quantiser, group: int) -> None:
        super().__init__(quantiser, growth=1)
        self.group = group

    @property
    def tokens(self) -> int:
        return self.queue.count * self.group

    @property
    def unit(self) -> int:
        """Whole groups, or words of the codes of a single group, which may be long."""
        return WORD if self.queue.count == 1 else self.group

    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        self._append(x.unflatten(2, (-1, self.group)).mT, dtype)

    def block(self, some: slice) -> Tensor:
        words, scale, minimum = map(self.queue.view, Group._fields)
        count, each = self.group, WORD // self.quantiser.bits
        if self.queue.count == 1:
            words, count = words[..., some.start // each : -(-some.stop // each)], some.stop - some.start
        else:
            words, scale, minimum = (x[:, :, some.start // count : some.stop // count] for x in (words, scale, minimum))
        return self.quantiser.dequantise(Group(words, scale, minimum), count).mT


class TokenCodes(GroupCodes):
    """Tokens one by one, each in groups of G channels: words [B,H,N,D/G,W], scale and minimum [B,H,N,D/G].

    heads: a group spans a token's channels of this many heads, [B,1,N,H*D/G,...]; None: every head has its own groups.
    """

    def __init__(self, quantiser: Quantiser, group: int, growth: int, heads: int | None = None) -> None:
        super().__init__(quantiser, growth)
        self.group, self.heads = group, heads

    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        if self.heads is not None:
            x = x.transpose(1, 2).flatten(2)[:, None]
        check = x.shape[2] > 1 or on_host(x)  # while decoding, the host would wait for a GPU at every token
        self._append(x.unflatten(3, (-1, self.group)), dtype, check)

    def block(self, some: slice) -> Tensor:
        held = Group(*(self.queue.view(name)[:, :, some] for name in Group._fields))
        x = self.quantiser.dequantise(held, self.group).flatten(-2)
        x = x if self.heads is None else x[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return x[:, :, None]


TAIL_GROWTH = 16  # slots; a tail is at most a few hundred tokens long, so moving it this often costs nothing


class Column:
    """Tokens, oldest first: codes, then the exact tail."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = list(chunks)
        self.tail = Queue(TAIL_GROWTH)

    @property
    def coded(self) -> int:
        """The number of tokens that are held as codes."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.coded + self.tail.count

    def quantise(self, count: int, x: Tensor | None = None, chunk: int = -1) -> None:
        """Quantise the tail's first `count` tokens as they are, or `x` [B,H,count,D] instead of them."""
        if count:
            own, codes = self.tail.oldest("x", count), self.chunks[chunk]
            assert isinstance(codes, Codes)
            codes.append(own if x is None else x, own.dtype)
            self.tail.drop(count)

    def replace_chunks(self, chunks: Sequence[Chunk], count: int) -> None:
        """Hold these chunks instead, which include the tail's first `count` tokens."""
        self.chunks = list(chunks)
        self.tail.drop(count)

    def scores(self, rows: Tensor) -> Tensor:
        """Products [B,H,r,C] of query rows [B,H,r,D] with the tokens."""
        found = [chunk.scores(rows) for chunk in self.chunks if chunk.tokens]
        return torch.cat([*found, rows @ self.tail.view("x").to(rows.dtype).mT], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [B,H,r,D] of the tokens with weights [B,H,r,C]."""
        chunks = [chunk for chunk in self.chunks if chunk.tokens]
        *coded, exact = weights.split([*(chunk.tokens for chunk in chunks), self.tail.count], dim=-1)
        sums: Tensor = exact @ self.tail.view("x").to(weights.dtype)
        for chunk, own in zip(chunks, coded, strict=True):
            sums += chunk.weighted(own)
        return sums

    def view(self) -> Tensor:
        """[B,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        chunks = [chunk.dequantised() for chunk in self.chunks if chunk.tokens]
        tail = widen(self.tail.view("x"))
        return torch.cat([*(x.to(tail.dtype) for x in chunks), tail], dim=2)

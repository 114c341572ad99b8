"""The keys, or the values, of one layer: chunks of codes, then a tail in full precision.

Shapes: B batch, H KV heads, C tokens, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.codes import Chunk, Codes, Exact
from kvbench.policies.stores.queue import Queue

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

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tail.nbytes() + sum(chunk.nbytes for chunk in self.chunks)

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
        tail = Exact(self.tail.view("x"), copy=False)
        return torch.cat([chunk.scores(rows) for chunk in (*self.chunks, tail) if chunk.tokens], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [B,H,r,D] of the tokens with weights [B,H,r,C]."""
        chunks = [chunk for chunk in (*self.chunks, Exact(self.tail.view("x"), copy=False)) if chunk.tokens]
        own = weights.split([chunk.tokens for chunk in chunks], dim=-1)
        return torch.stack([chunk.weighted(x) for chunk, x in zip(chunks, own, strict=True)]).sum(0)

    def view(self) -> Tensor:
        """[B,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        chunks = [chunk.dequantised() for chunk in self.chunks if chunk.tokens]
        tail = widen(self.tail.view("x"))
        return torch.cat([*(x.to(tail.dtype) for x in chunks), tail], dim=2)

"""The keys, or the values, of one layer: chunks of codes, then a tail in full precision.

Shapes: B batch, H KV heads, r query rows per KV head, C tokens of the longest head, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.codes import Chunk, Codes, Cover
from kvbench.policies.stores.queue import Counts, Queue
from kvbench.policies.stores.slots import take

TAIL_GROWTH = 16  # slots; a tail is at most a few hundred tokens long, so moving it this often costs nothing


class Column:
    """Tokens, oldest first: codes, then the exact tail. KV heads may hold different numbers of either."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = list(chunks)
        self.tail = Queue(TAIL_GROWTH)

    @property
    def coded(self) -> int:
        """The largest number of tokens that a head holds as codes."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def even(self) -> bool:
        """Whether all KV heads hold equally many tokens, equally many of them as codes."""
        return self.tail.counts is None and all(chunk.even for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens of the longest KV head."""
        return self.coded + self.tail.most if self.even else int(self.lengths().max())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tail.nbytes() + sum(chunk.nbytes for chunk in self.chunks)

    def lengths(self) -> Tensor:
        """[B,H] tokens of each KV head."""
        return self.coded_lengths() + self.tail.lengths()

    def coded_lengths(self) -> Tensor:
        """[B,H] tokens of each KV head that are held as codes."""
        zero = torch.zeros_like(self.tail.lengths())
        return sum((chunk.lengths() for chunk in self._filled()), zero)

    def append(self, x: Tensor, counts: Tensor | None) -> None:
        """Append x [B,H,n,D] to the tail; counts [B,H]: only the first tokens of each head."""
        self.tail.append({"x": x}, counts)

    def oldest(self, counts: Counts) -> Tensor:
        """The tail's first tokens, n the largest of `counts`: [B,H,n,D]."""
        return self.tail.oldest("x", most(counts))

    def quantise(self, counts: Counts, x: Tensor | None = None, chunk: int = -1) -> None:
        """Quantize the tail's first tokens as they are, or `x` [B,H,n,D] instead of them."""
        if most(counts) == 0:
            return
        own, codes = self.oldest(counts), self.chunks[chunk]
        assert isinstance(codes, Codes)
        codes.append(own if x is None else x, own.dtype, counts if isinstance(counts, Tensor) else None)
        self.tail.drop(counts)

    def replace_chunks(self, chunks: Sequence[Chunk], counts: Counts) -> None:
        """Hold these chunks instead, which include the tail's first `counts` tokens."""
        self.chunks = list(chunks)
        self.tail.drop(counts)

    def view(self, cover: Cover | None = None) -> Tensor:
        """[B,H,C,D] in the model's dtype, dequantized if it was quantized."""
        tail = self.tail.view("x")
        x = torch.cat([*(chunk.dequantised(cover).to(tail.dtype) for chunk in self._filled()), tail], dim=2)
        return x if self.even else take(x, self._order())

    def logits(self, queries: Tensor, cover: Cover | None = None) -> Tensor:
        """queries [B,H,r,D] float32 times keys: [B,H,r,C]."""
        parts = [chunk.logits(queries, cover) for chunk in self._filled()]
        if self.tail.most:
            parts.append(queries @ widen(self.tail.view("x")).mT)
        rows = torch.cat(parts, dim=-1)
        return rows if self.even else rows.gather(-1, self._order()[:, :, None].expand(-1, -1, rows.shape[2], -1))

    def mix(self, weights: Tensor, cover: Cover | None = None) -> Tensor:
        """weights [B,H,r,C] float32 times values: [B,H,r,D]."""
        if not self.even:
            spread = weights.new_zeros(*weights.shape[:-1], self.coded + self.tail.most)
            order = self._order()[:, :, None].expand_as(weights)
            weights = spread.scatter_add_(-1, order, weights)  # beyond a head's own tokens weights are 0
        chunks = self._filled()
        *own, rest = weights.split([*(chunk.tokens for chunk in chunks), self.tail.most], dim=-1)
        parts = [chunk.mix(part, cover) for chunk, part in zip(chunks, own, strict=True)]
        if self.tail.most:
            parts.append(rest @ widen(self.tail.view("x")))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _filled(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.tokens]

    def _order(self) -> Tensor:
        """[B,H,C] place of each head's i-th token among codes and tail; beyond its last token any valid place."""
        steps = torch.arange(self.tokens, device=self.tail.lengths().device)
        coded = self.coded_lengths()[..., None]
        places = torch.where(steps < coded, steps, steps + self.coded - coded)
        return places.clamp(max=self.coded + self.tail.most - 1)


def most(counts: Counts) -> int:
    """The largest of counts."""
    return counts if isinstance(counts, int) else int(counts.max())


def beyond(tokens: Counts, residual: int) -> Counts:
    """The number of tokens that exceeds `residual`, at least 0."""
    more = tokens - residual
    return more.clamp(min=0) if isinstance(more, Tensor) else max(more, 0)

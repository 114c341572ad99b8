"""Chunks: consecutive tokens of a column in one format, and the two matrix products of attention with them.

The products dequantize a block of tokens at a time, in float32.
Shapes: B batch, H KV heads, r query rows per KV head, N tokens, D head dim, G tokens (or channels) of a group.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.quantiser import Group, Quantiser
from kvbench.policies.stores.queue import Queue

BLOCK = 2**20  # numbers dequantized at a time, 4 MiB of float32: smaller blocks cost more in calls than they save
TYPICAL_DIM = 128  # of a head, to choose the number of tokens in a block

Cover = Callable[[Tensor, int], Tensor]
"""Replaces some of the tokens [B,H,n,D] of a chunk, of which the first is given by its number."""


class Chunk(ABC):
    """Consecutive tokens of a column in one format."""

    unit: int = 1
    """Tokens that are quantized together."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of tokens."""

    @abstractmethod
    def vectors(self, first: int, last: int) -> Tensor:
        """The tokens from `first` to before `last`, both multiples of `unit`: [B,H,n,D] float32, in order."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by kind."""

    @property
    def nbytes(self) -> int:
        """The sum of `sizes`."""
        return sum(self.sizes().values())

    def dequantised(self, cover: Cover | None = None) -> Tensor:
        """[B,H,N,D] float32, in order."""
        x = self.vectors(0, self.tokens)
        return x if cover is None else cover(x, 0)

    def logits(self, queries: Tensor, cover: Cover | None = None) -> Tensor:
        """queries [B,H,r,D] times the keys: [B,H,r,N]."""
        return torch.cat([queries @ x.mT for _, x in self._blocks(queries, cover)], dim=-1)

    def mix(self, weights: Tensor, cover: Cover | None = None) -> Tensor:
        """weights [B,H,r,N] times the values: [B,H,r,D]."""
        parts = [weights[..., first : first + x.shape[2]] @ x for first, x in self._blocks(weights, cover)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _blocks(self, rows: Tensor, cover: Cover | None) -> Iterator[tuple[int, Tensor]]:
        """Some tokens at a time, in the dtype of rows [B,H,...], and the number of the first."""
        size = max(1, BLOCK // (rows.shape[0] * rows.shape[1] * TYPICAL_DIM * self.unit)) * self.unit
        for first in range(0, self.tokens, size):
            x = self.vectors(first, min(first + size, self.tokens)).to(rows.dtype)
            yield first, x if cover is None else cover(x, first)


class Exact(Chunk):
    """Tokens x [B,H,N,D] in full precision."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.clone(memory_format=torch.contiguous_format)

    @property
    def tokens(self) -> int:
        return self._x.shape[2]

    def vectors(self, first: int, last: int) -> Tensor:
        return widen(self._x[:, :, first:last])

    def sizes(self) -> dict[str, int]:
        return {"full precision": self._x.nbytes}


class Codes(Chunk):
    """A growing chunk of coded tokens, appended `unit` tokens at a time."""

    def __init__(self, growth: int) -> None:
        self.queue = Queue(growth)

    @property
    def tokens(self) -> int:
        return self.queue.count * self.unit

    @abstractmethod
    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        """Code x [B,H,n,D] of a model in `dtype`."""

    @property
    def nbytes(self) -> int:
        return self.queue.nbytes()  # read in every step, hence without the breakdown


class GroupCodes(Codes):
    """Codes of a quantizer, with a scale and a minimum for each group of numbers."""

    def __init__(self, quantiser: Quantiser, growth: int) -> None:
        super().__init__(growth)
        self.quantiser = quantiser

    def sizes(self) -> dict[str, int]:
        return {"codes": self.queue.nbytes("words"), "scales and minima": self.queue.nbytes("scale", "minimum")}

    def _append(self, groups: Tensor, dtype: torch.dtype) -> None:
        self.queue.append(self.quantiser.quantise(groups, dtype)._asdict())

    def _numbers(self, first: int, last: int, count: int) -> Tensor:
        """The dequantized groups of `count` numbers of some entries."""
        held = Group(*(self.queue.view(name)[:, :, first:last] for name in Group._fields))
        return self.quantiser.dequantise(held, count)


class ChannelCodes(GroupCodes):
    """Groups of `unit` consecutive tokens, each channel with its own scale: words [B,H,N/G,D,W], scale [B,H,N/G,D]."""

    def __init__(self, quantiser: Quantiser, group: int) -> None:
        super().__init__(quantiser, growth=1)
        self.unit = group

    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        self._append(x.unflatten(2, (-1, self.unit)).mT, dtype)

    def vectors(self, first: int, last: int) -> Tensor:
        return self._numbers(first // self.unit, last // self.unit, self.unit).mT.flatten(2, 3)


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
        self._append(x.unflatten(3, (-1, self.group)), dtype)

    def vectors(self, first: int, last: int) -> Tensor:
        x = self._numbers(first, last, self.group).flatten(-2)
        return x if self.heads is None else x[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)

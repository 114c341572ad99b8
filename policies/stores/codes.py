"""Chunks: consecutive tokens of a column in one format.

Shapes: B batch, H KV heads, N tokens, D head dim, G tokens (or channels) of a group.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.quantiser import Group, Quantiser
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
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by kind."""

    @property
    def nbytes(self) -> int:
        """The sum of `sizes`."""
        return sum(self.sizes().values())


class Exact(Chunk):
    """Tokens x [B,H,N,D] in full precision."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.clone(memory_format=torch.contiguous_format)

    @property
    def tokens(self) -> int:
        return self._x.shape[2]

    def dequantised(self) -> Tensor:
        return widen(self._x)

    def sizes(self) -> dict[str, int]:
        return {"full precision": self._x.nbytes}


class Codes(Chunk):
    """A growing chunk of coded tokens, appended `unit` tokens at a time."""

    unit: int = 1

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
    """Codes of a quantiser, with a scale and a minimum for each group of numbers."""

    def __init__(self, quantiser: Quantiser, growth: int) -> None:
        super().__init__(growth)
        self.quantiser = quantiser

    def sizes(self) -> dict[str, int]:
        return {"codes": self.queue.nbytes("words"), "scales and minima": self.queue.nbytes("scale", "minimum")}

    def _append(self, groups: Tensor, dtype: torch.dtype) -> None:
        self.queue.append(self.quantiser.quantise(groups, dtype)._asdict())

    def _numbers(self, count: int) -> Tensor:
        """The dequantised groups of `count` numbers."""
        return self.quantiser.dequantise(Group(*map(self.queue.view, Group._fields)), count)


class ChannelCodes(GroupCodes):
    """Groups of `unit` consecutive tokens, each channel with its own scale: words [B,H,N/G,D,W], scale [B,H,N/G,D]."""

    def __init__(self, quantiser: Quantiser, group: int) -> None:
        super().__init__(quantiser, growth=1)
        self.unit = group

    def append(self, x: Tensor, dtype: torch.dtype) -> None:
        self._append(x.unflatten(2, (-1, self.unit)).mT, dtype)

    def dequantised(self) -> Tensor:
        return self._numbers(self.unit).mT.flatten(2, 3)


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

    def dequantised(self) -> Tensor:
        x = self._numbers(self.group).flatten(-2)
        return x if self.heads is None else x[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)

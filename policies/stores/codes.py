"""Chunks: consecutive tokens of a column in one format.

Shapes: B batch, H KV heads, r query rows per KV head, N tokens, D head dim, G tokens (or channels) of a group.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.code_attention import blocks, scores_by_block, weighted_by_block
from kvbench.policies.stores.packing import unpack
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

    def scores(self, rows: Tensor) -> Tensor:
        """Products [B,H,r,N] of query rows [B,H,r,D] with the tokens, which are keys."""
        return rows @ self.dequantised().to(rows.dtype).mT

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [B,H,r,D] of the tokens, which are values, with weights [B,H,r,N]."""
        return weights @ self.dequantised().to(weights.dtype)

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by kind."""

    @property
    def nbytes(self) -> int:
        """The sum of `sizes`."""
        return sum(self.sizes().values())


class Exact(Chunk):
    """Tokens x [B,H,N,D] in full precision."""

    def __init__(self, x: Tensor, copy: bool = True) -> None:
        self._x = x.clone(memory_format=torch.contiguous_format) if copy else x

    @property
    def tokens(self) -> int:
        return self._x.shape[2]

    def dequantised(self) -> Tensor:
        return widen(self._x)

    def scores(self, rows: Tensor) -> Tensor:
        return scores_by_block(rows, self.tokens, lambda heads, some: self._x[:, heads, some])

    def weighted(self, weights: Tensor) -> Tensor:
        return weighted_by_block(weights, self._x.shape[3], lambda heads, some: self._x[:, heads, some])

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

    def _blocks(self, numbers: int, count: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Group]]:
        """Heads and entries of `numbers` numbers each, and their groups of `count` codes in `dtype` instead of words."""
        words, scale, minimum = map(self.queue.view, Group._fields)
        for heads, some in blocks(words.shape[1], words.shape[2], numbers, words.device):
            codes = unpack(words[:, heads, some], self.quantiser.bits, count).to(dtype)
            yield heads, some, Group(codes, scale[:, heads, some].to(dtype), minimum[:, heads, some].to(dtype))

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

    def scores(self, rows: Tensor) -> Tensor:
        if self.quantiser.fp16_arith:
            return super().scores(rows)
        out = rows.new_empty(*rows.shape[:3], self.tokens)
        for heads, some, (codes, scale, minimum) in self._blocks(rows.shape[3] * self.unit, self.unit, rows.dtype):
            own = rows[:, heads, None]
            products = (own * scale[..., None, :]) @ codes + own @ minimum[..., None]  # [B,h,n,r,G]
            out[:, heads, :, some.start * self.unit : some.stop * self.unit] = products.transpose(2, 3).flatten(3)
        return out

    def weighted(self, weights: Tensor) -> Tensor:
        if self.quantiser.fp16_arith:
            return super().weighted(weights)
        dim = self.queue.view("scale").shape[3]
        out, grouped = weights.new_zeros(*weights.shape[:3], dim), weights.unflatten(3, (-1, self.unit)).transpose(2, 3)
        for heads, some, (codes, scale, minimum) in self._blocks(dim * self.unit, self.unit, weights.dtype):
            own = grouped[:, heads, some]  # [B,h,n,r,G]
            sums = (own @ codes.mT) * scale[..., None, :] + own.sum(-1, keepdim=True) * minimum[..., None, :]
            out[:, heads] += sums.sum(2)
        return out


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

    def weighted(self, weights: Tensor) -> Tensor:
        if self.quantiser.fp16_arith:
            return super().weighted(weights)
        groups = self.queue.view("scale").shape[3]
        dim = groups * self.group // (self.heads or 1)
        size, out = math.gcd(dim, self.group), weights.new_zeros(*weights.shape[:3], dim)  # `size` channels of one head
        for heads, some, (codes, *scales) in self._blocks(groups * self.group, self.group, weights.dtype):
            codes = codes.flatten(3).unflatten(3, (-1, size))  # [B,h,n,D/size,size], or all heads in dimension 3
            scale, minimum = (x.repeat_interleave(self.group // size, 3) for x in scales)
            if self.heads is not None:
                heads = slice(0, self.heads)
                codes, scale, minimum = (
                    x[:, 0].unflatten(2, (self.heads, -1)).transpose(1, 2) for x in (codes, scale, minimum)
                )
            own = weights[:, heads, :, some]
            sums = (own[:, :, None] * scale.mT[:, :, :, None]) @ codes.transpose(2, 3)  # [B,h,D/size,r,size]
            sums += (own @ minimum).mT[..., None]
            out[:, heads] += sums.transpose(2, 3).flatten(3)
        return out

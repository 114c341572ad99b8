"""Quantised tokens, append-only, and the two matrix products of attention computed from their codes.

The products unpack a block of codes at a time (a group at least) and never build keys or values: scales and minima go
into the small side (queries, weights) or into the result. Arithmetic is float32.
Shapes: B batch, H KV heads, r query rows per KV head, N tokens, D head dim, G tokens (or channels) of a group.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.packing import SHORT, WORD, in_order, scaled, times_codes, times_codes_transposed
from kvbench.policies.stores.quantiser import Group, Quantiser
from kvbench.policies.stores.queue import Queue

BLOCK = 2**20  # numbers unpacked at a time, 4 MiB of float32: smaller blocks cost more in calls than they save in cache


class Run(ABC):
    """Consecutive tokens of a column in one format; KV heads may hold different numbers of tokens."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of the longest KV head."""

    @property
    def even(self) -> bool:
        """Whether all KV heads hold equally many."""
        return True

    @abstractmethod
    def lengths(self) -> Tensor:
        """[B,H] tokens of each KV head."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """[B,H,N,D] float32, in order."""

    def places(self) -> Tensor | None:
        """[B,H,N] place of each head's i-th token in `logits` and `mix`; None: i."""
        return None

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor held, by kind."""

    @property
    def nbytes(self) -> int:
        """The sum of `sizes`."""
        return sum(self.sizes().values())

    def logits(self, queries: Tensor) -> Tensor:
        """queries [B,H,r,D] times the keys: [B,H,r,N]."""
        return queries @ self.dequantised().transpose(-1, -2)

    def mix(self, weights: Tensor) -> Tensor:
        """weights [B,H,r,N] times the values: [B,H,r,D]."""
        return weights @ self.dequantised()


class Exact(Run):
    """Tokens x [B,H,N,D] in full precision."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.clone(memory_format=torch.contiguous_format)

    @property
    def tokens(self) -> int:
        return self._x.shape[2]

    def lengths(self) -> Tensor:
        return torch.full(self._x.shape[:2], self.tokens, device=self._x.device)

    def dequantised(self) -> Tensor:
        return widen(self._x)

    def sizes(self) -> dict[str, int]:
        return {"full precision": self._x.nbytes}


class Codes(Run):
    """A growing run of coded tokens, appended `unit` tokens at a time."""

    unit: int = 1

    def __init__(self, growth: int) -> None:
        self.queue = Queue(growth)

    @property
    def tokens(self) -> int:
        return self.queue.most * self.unit

    def lengths(self) -> Tensor:
        return self.queue.lengths() * self.unit

    @property
    def even(self) -> bool:
        return self.queue.counts is None

    @abstractmethod
    def append(self, x: Tensor, dtype: torch.dtype, counts: Tensor | None = None) -> None:
        """Code x [B,H,n,D] of a model in `dtype`; counts [B,H]: only the first so many tokens of each head."""

    @property
    def nbytes(self) -> int:
        return self.queue.nbytes()  # read at every step, hence without the breakdown

    def _blocks(self, numbers_per_entry: int) -> Iterator[tuple[int, int]]:
        size = max(1, BLOCK // numbers_per_entry)
        for first in range(0, self.queue.most, size):
            yield first, min(first + size, self.queue.most)


class GroupCodes(Codes):
    """Codes of a quantiser, with a scale and a minimum for each group of numbers."""

    def __init__(self, quantiser: Quantiser, growth: int) -> None:
        super().__init__(growth)
        self.quantiser = quantiser

    def sizes(self) -> dict[str, int]:
        queue = self.queue
        sizes = {"codes": queue.nbytes("words"), "scales and minima": queue.nbytes("scale", "minimum")}
        return {**sizes, "positions": queue.lengths_nbytes}

    def _store(self, group: Group, counts: Tensor | None) -> None:
        self.queue.append(group._asdict(), None if counts is None else counts // self.unit)

    def _group(self, first: int, last: int) -> Group:
        return Group(*(self.queue.view(name)[:, :, first:last] for name in Group._fields))


class ChannelCodes(GroupCodes):
    """Groups of `unit` consecutive tokens, each channel with its own scale: words [B,H,N/G,D,W], scale [B,H,N/G,D]."""

    def __init__(self, quantiser: Quantiser, group: int) -> None:
        super().__init__(quantiser, growth=1)
        self.unit = group

    def append(self, x: Tensor, dtype: torch.dtype, counts: Tensor | None = None) -> None:
        self._store(self.quantiser.quantise_tokens(x, self.unit, False, dtype), counts)

    def dequantised(self) -> Tensor:
        return self.quantiser.dequantise(self._group(0, self.queue.most), self.unit).transpose(-1, -2).flatten(2, 3)

    def logits(self, queries: Tensor) -> Tensor:
        parts = []
        for group, _ in self._pieces():
            scaled_queries = queries[:, :, None] * group.scale[:, :, :, None]  # [B,H,n,r,D]
            rows = times_codes(scaled_queries, group.words, self.quantiser.bits, self.unit)  # [B,H,n,r,G]
            least = queries @ group.minimum.to(queries.dtype).transpose(-1, -2)  # [B,H,r,n]
            parts.append((rows.transpose(2, 3) + least[..., None]).flatten(3))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def mix(self, weights: Tensor) -> Tensor:
        out = weights.new_zeros(*weights.shape[:3], self.queue.view("scale").shape[-1])
        for group, tokens in self._pieces():
            part = weights[..., tokens].unflatten(-1, (-1, self.unit)).transpose(2, 3)  # [B,H,n,r,G]
            sums = times_codes_transposed(part, group.words, self.quantiser.bits)  # [B,H,n,r,D]
            out += (sums * group.scale[:, :, :, None]).sum(2)
            out += part.sum(-1).transpose(-1, -2) @ group.minimum.to(weights.dtype)
        return out

    def _pieces(self) -> Iterator[tuple[Group, slice]]:
        """Some groups at a time, and their tokens."""
        batch, heads, _, dim, _ = self.queue.view("words").shape
        for first, last in self._blocks(batch * heads * dim * self.unit):
            yield self._group(first, last), slice(first * self.unit, last * self.unit)


class TokenCodes(GroupCodes):
    """Tokens one by one, each in groups of G channels: words [B,H,N,D/G,W], scale and minimum [B,H,N,D/G].

    heads: groups span a token's channels of so many heads, [B,1,N,H*D/G,...]; None: every head has groups of its own.
    """

    def __init__(self, quantiser: Quantiser, group: int, growth: int, heads: int | None = None) -> None:
        super().__init__(quantiser, growth)
        self.group, self.heads = group, heads

    def append(self, x: Tensor, dtype: torch.dtype, counts: Tensor | None = None) -> None:
        if self.heads is not None:
            x = x.transpose(1, 2).flatten(2)[:, None]
        self._store(self.quantiser.quantise_tokens(x, self.group, True, dtype), counts)

    def dequantised(self) -> Tensor:
        return self._by_head(self.quantiser.dequantise(self._group(0, self.queue.most), self.group).flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        """[B,1,N,H*n] -> [B,H,N,n], where heads were joined."""
        return x if self.heads is None else x[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mix(self, weights: Tensor) -> Tensor:
        batch, heads, rows, _ = weights.shape
        dim = self.queue.view("scale").shape[-1] * self.group // (self.heads or 1)
        out = weights.new_zeros(batch, heads, rows, dim)
        for first, last in self._blocks(batch * heads * dim):
            part, group = weights[..., first:last], self._group(first, last)
            own = group if self.heads is None else self._of_heads(group, dim)
            if own is None:
                out += part @ self._by_head(self.quantiser.dequantise(group, self.group).flatten(-2))
            else:
                out += self._mix_block(part, own, dim)
        return out

    def _of_heads(self, group: Group, dim: int) -> Group | None:
        """Groups over joined heads as groups of each head, [B,H,N,D/G,W]; a scale that all heads share is not repeated.

        None where a group ends inside a head, or a head inside a word.
        """
        if dim % self.group and (self.group % dim or dim * self.quantiser.bits % WORD):
            return None
        words = self._by_head(group.words.flatten(-2)).contiguous()
        scale, minimum = group.scale, group.minimum
        if self.group < dim * (self.heads or 1):
            copies = max(1, self.group // dim)
            scale, minimum = (self._by_head(x.repeat_interleave(copies, dim=-1)) for x in (scale, minimum))
        return Group(words.unflatten(-1, (scale.shape[-1], -1)), scale, minimum)

    def _mix_block(self, weights: Tensor, group: Group, dim: int) -> Tensor:
        """weights [B,H,r,n] of a block of tokens: [B,H,r,D]."""
        bits, groups, width = self.quantiser.bits, group.scale.shape[-1], min(self.group, dim)
        least = weights @ group.minimum.to(weights.dtype)  # [B,H,r,D/G]
        if groups > 1 and group.words.shape[-1] <= SHORT:
            codes = scaled(group.words, group.scale.to(weights.dtype), bits)  # [B,H,n,D/G,G]
            sums = in_order((weights @ codes.flatten(-2)).unflatten(-1, (groups, -1)), bits, width)  # [B,H,r,D/G,G]
        else:
            parts = (
                times_codes(weights * group.scale[:, :, None, :, g], group.words[..., g, :], bits, width)
                for g in range(groups)
            )
            sums = torch.stack(list(parts), dim=-2)
        return (sums + least[..., None]).flatten(-2)

"""Queues: tensors that grow at one end and shrink at the other, every KV head at its own length.

Shapes: B batch, H KV heads, n entries (tokens, or groups of tokens).
"""

import torch
from torch import Tensor

from kvbench.policies.stores.slots import take

Counts = int | Tensor
"""A number for all KV heads, or one for each, [B,H] long."""


class Queue:
    """Tensors [B,H,capacity,...] that share their entries: KV head (b,h) uses counts[b,h] of them, oldest first.

    `most` is the largest count. counts None: all heads hold `most`. The first entries are stored without a copy; for
    later ones capacity is reserved `growth` entries at a time.
    """

    def __init__(self, growth: int) -> None:
        self.most = 0
        self.counts: Tensor | None = None  # [B,H] long
        self._growth = growth
        self._start = 0
        self._tensors: dict[str, Tensor] = {}

    def nbytes(self, *names: str) -> int:
        """Bytes of the named tensors, unused capacity included; of everything held if none is named."""
        sizes = sum(self._tensors[name].nbytes for name in names or self._tensors if name in self._tensors)
        return sizes if names else sizes + self.lengths_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes of the entries that are not in use."""
        if not self._tensors:
            return 0
        some = next(iter(self._tensors.values()))
        entries = some.shape[0] * some.shape[1] * some.shape[2]
        empty = entries - int(self.lengths().sum())
        return sum(empty * (x.nbytes // max(entries, 1)) for x in self._tensors.values())

    def expect(self, entries: int) -> None:
        """At most so many entries will be appended: no more capacity is reserved at once."""
        self._growth = min(self._growth, entries)

    @property
    def lengths_nbytes(self) -> int:
        """Bytes of `counts`."""
        return 0 if self.counts is None else self.counts.nbytes

    def view(self, name: str) -> Tensor:
        """[B,H,most,...]; beyond a head's own count entries are finite but mean nothing."""
        return self.oldest(name, self.most)

    def oldest(self, name: str, count: int) -> Tensor:
        """The first `count` entries, [B,H,count,...]."""
        return self._tensors[name][:, :, self._start : self._start + count]

    def lengths(self) -> Tensor:
        """[B,H] entries of each head."""
        if self.counts is not None:
            return self.counts
        some = next(iter(self._tensors.values()))
        return torch.full(some.shape[:2], self.most, device=some.device)

    def append(self, new: dict[str, Tensor], counts: Tensor | None = None) -> None:
        """Append entries [B,H,n,...] by name; counts [B,H]: only the first so many of each head."""
        entering = next(iter(new.values())).shape[2]
        if not self._tensors:
            self._tensors, self.most = dict(new), entering
            if counts is not None:
                self._set_counts(counts.clone())
            return
        self._reserve(entering)
        end = self._start + self.most
        if self.counts is None and counts is None:
            for name, x in new.items():
                self._tensors[name][:, :, end : end + entering] = x
            self.most += entering
            return
        held = self.lengths()
        counts = torch.full_like(held, entering) if counts is None else counts
        chosen = torch.arange(entering, device=held.device) < counts[..., None]  # [B,H,n]
        batch, head, entry = chosen.nonzero(as_tuple=True)
        slot = self._start + held[batch, head] + entry
        for name, x in new.items():
            self._tensors[name][batch, head, slot] = x[batch, head, entry].to(self._tensors[name].dtype)
        self._set_counts(held + counts)

    @property
    def counts_held(self) -> Counts:
        """Entries of all heads, or of each."""
        return self.most if self.counts is None else self.counts

    def drop(self, counts: Counts) -> None:
        """Remove the oldest entries."""
        if isinstance(counts, int) and self.counts is None:
            self._start += counts
            self.most -= counts
            if self.most == 0:
                self.compact()
            return
        held = self.lengths()
        steps = torch.arange(self.most, device=held.device) + self._start
        gone = counts[..., None] if isinstance(counts, Tensor) else counts
        for name, x in self._tensors.items():
            slots = (steps + gone).clamp(max=x.shape[2] - 1).expand(*held.shape, -1)
            self._tensors[name] = take(x, slots)
        self._start = 0
        self._set_counts(held - counts)

    def compact(self) -> None:
        """Copy the entries in use, which frees larger tensors they are views of, and unused capacity."""
        self._tensors = {name: self.view(name).clone(memory_format=torch.contiguous_format) for name in self._tensors}
        self._start = 0

    def _set_counts(self, counts: Tensor) -> None:
        self.most = int(counts.max())
        self.counts = None if int(counts.min()) == self.most else counts

    def _reserve(self, entering: int) -> None:
        """Reserve capacity for `entering` more at the end."""
        capacity = next(iter(self._tensors.values())).shape[2]
        if self._start + self.most + entering <= capacity:
            return
        more = max(entering, self._growth)
        for name, x in self._tensors.items():
            room = x.new_zeros(*x.shape[:2], self.most + more, *x.shape[3:])
            room[:, :, : self.most] = self.view(name)
            self._tensors[name] = room
        self._start = 0

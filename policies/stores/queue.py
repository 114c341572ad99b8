"""Queues: tensors that grow at one end and shrink at the other. Shapes: B batch, H KV heads, n entries."""

import torch
from torch import Tensor


class Queue:
    """Tensors [B,H,capacity,...] by name that share their `count` entries (tokens or groups of tokens), oldest first.

    The first entries are stored without a copy; later, capacity is reserved for `growth` entries at a time.
    """

    def __init__(self, growth: int) -> None:
        self.count = 0
        self._growth = growth
        self._start = 0
        self._tensors: dict[str, Tensor] = {}

    def nbytes(self, *names: str) -> int:
        """Bytes of the named tensors (default: all), unused capacity included."""
        return sum(self._tensors[name].nbytes for name in names or self._tensors if name in self._tensors)

    @property
    def spare_nbytes(self) -> int:
        """Bytes of the unused capacity."""
        return sum(x.nbytes // max(x.shape[2], 1) * (x.shape[2] - self.count) for x in self._tensors.values())

    def expect(self, entries: int) -> None:
        """Reserve capacity for no more than this number of later entries at a time."""
        self._growth = min(self._growth, entries)

    def view(self, name: str) -> Tensor:
        """[B,H,count,...]."""
        return self.oldest(name, self.count)

    def oldest(self, name: str, count: int) -> Tensor:
        """The first `count` entries, [B,H,count,...]."""
        return self._tensors[name][:, :, self._start : self._start + count]

    def append(self, new: dict[str, Tensor]) -> None:
        """Append entries [B,H,n,...] by name."""
        entering = next(iter(new.values())).shape[2]
        if not self._tensors:
            self._tensors = dict(new)
        else:
            self._reserve(entering)
            end = self._start + self.count
            for name, x in new.items():
                self._tensors[name][:, :, end : end + entering] = x
        self.count += entering

    def drop(self, count: int) -> None:
        """Remove the oldest entries."""
        self._start += count
        self.count -= count
        if self.count == 0:
            self.compact()

    def compact(self) -> None:
        """Copy the entries, which frees unused capacity and larger tensors that they are views of."""
        self._tensors = {name: self.view(name).clone(memory_format=torch.contiguous_format) for name in self._tensors}
        self._start = 0

    def _reserve(self, entering: int) -> None:
        """Reserve capacity for `entering` more entries."""
        capacity = next(iter(self._tensors.values())).shape[2]
        if self._start + self.count + entering <= capacity:
            return
        more = max(entering, self._growth)
        for name, x in self._tensors.items():
            longer = x.new_zeros(*x.shape[:2], self.count + more, *x.shape[3:])
            longer[:, :, : self.count] = self.view(name)
            self._tensors[name] = longer
        self._start = 0

"""The contract of an allocator: who gets how much of the budget."""

from abc import ABC, abstractmethod


class Allocator(ABC):
    """Shares a total of slots out over the layers. Subclasses are frozen dataclasses of their knobs."""

    @abstractmethod
    def split(self, total: int, layers: int, length: int | None) -> list[int]:
        """Slots per KV head for each of `layers` layers, summing to `total` exactly.

        length: prompt length in tokens, None while unknown (then only allocators that do not need it may be used).
        """

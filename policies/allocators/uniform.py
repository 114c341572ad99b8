"""The same budget for every layer."""

from dataclasses import dataclass

from kvbench.policies.allocators.allocator import Allocator, even_shares


@dataclass(frozen=True)
class Uniform(Allocator):
    """Deal the total evenly; where it does not divide, the first layers get one slot more."""

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return even_shares(total, layers)

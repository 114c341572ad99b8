"""The same budget for every layer."""

from dataclasses import dataclass

from kvbench.policies.allocators.allocator import Allocator, even_shares


@dataclass(frozen=True)
class Uniform(Allocator):
    """Divide the total evenly; the first layers get one extra slot each if there is a remainder."""

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return even_shares(total, layers)

"""The same budget for every layer."""

from dataclasses import dataclass

from kvbench.policies.allocators.allocator import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """Deal the total evenly; where it does not divide, the first layers get one slot more."""

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        base, more = divmod(total, layers)
        return [base + (layer < more) for layer in range(layers)]

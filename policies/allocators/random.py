"""Random shares over the layers: a baseline for allocators."""

from dataclasses import dataclass
from random import Random as Generator

from kvbench.policies.allocators.allocator import Allocator, even_shares, required_length
from kvbench.policies.allocators.webster import webster
from kvbench.policies.checks import whole_number


@dataclass(frozen=True)
class Random(Allocator):
    """Slots without protected tokens, in proportion to one uniform draw per layer, the same for all prompts.

        b_l = u_l / (sum_k u_k) * B * L, 0 <= u_l < 1

    Prompts that fit the budget are not evicted.

    seed: seed of the draws.
    Source: Qin et al. 2025, arXiv 2503.12491, table 2, which does not give the distribution.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, 0)

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        length = required_length(length, "a random allocation")
        if length * layers <= total:
            return even_shares(total, layers)
        draws = Generator(self.seed)
        preference = [draws.random() for _ in range(layers)]
        return [floor + slots for slots in webster(preference, total - floor * layers, length - floor)]

"""PyramidKV: budgets that fall linearly from the first to the last layer."""

from dataclasses import dataclass
from typing import Literal

from kvbench.policies.allocators.allocator import Allocator, even_shares, required_length
from kvbench.policies.allocators.webster import webster
from kvbench.policies.checks import check_choices, number


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Slots without protected tokens fall linearly from 2m - m/beta in the first layer to m/beta in the last.

        b_l = b_0 - l * (b_0 - b_(L-1)) / (L - 1)
        b_0 = 2 m - m / beta, b_(L-1) = m / beta

    m: the mean of these slots over the layers. If a prompt has fewer candidates than the first layer's share, the first
    layer gets all candidates and the last layer gets 2m minus their number. Prompts that fit the budget are not
    evicted.

    beta: the steepness; the last layer gets m / beta. rounding: `webster` rounds the slope to the exact total.
    `official` truncates the ends and the step as the released code does, which keeps up to 15% more than the budget,
    and gives every layer the same share if a prompt is shorter than 2m; `adakv` is the same without this exception.
    Source: Cai et al. 2024, arXiv 2406.02069, section 3.2 and its code; beta = 20 is the value of its runs.
    """

    beta: float = 20.0
    rounding: Literal["webster", "official", "adakv"] = "webster"

    def __post_init__(self) -> None:
        number("beta", self.beta, 1)
        check_choices(self)

    @property
    def exact(self) -> bool:
        return self.rounding == "webster"

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        length = required_length(length, "a pyramid over the layers")
        if length * layers <= total:
            return even_shares(total, layers)
        if self.rounding == "webster":
            high, low = self._ends((total - floor * layers) / layers, length - floor)
            step = (high - low) / max(1, layers - 1)
            slope = [max(low, high - layer * step) for layer in range(layers)]
            return [floor + slots for slots in webster(slope, total - floor * layers, length - floor)]
        mean = total // layers - floor
        if self.rounding == "official" and length < 2 * mean:
            return [floor + mean] * layers
        high, low = (int(end) for end in self._ends(mean, length - floor))
        step = (high - low) // max(1, layers - 1)
        return [floor + high - layer * step for layer in range(layers)]

    def _ends(self, mean: float, most: int) -> tuple[float, float]:
        """Slots of the first layer (at most `most`) and of the last layer; whole numbers except for `webster`."""
        low = mean / self.beta if self.exact else int(mean // self.beta)
        high = 2 * mean - low
        return (most, 2 * mean - most) if high >= most else (high, low)

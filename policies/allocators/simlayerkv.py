"""SimLayerKV: lazy layers keep sinks and recent tokens; other layers keep every token.

Shapes: B batch, H_kv KV heads, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.checks import number, whole_number
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State


@dataclass(frozen=True)
class SimLayerKV(StatisticAllocator):
    """A layer is lazy if its last query mostly attends to the first and the newest tokens; it keeps only these tokens.

        l "is lazy if" mean_h sum_(j < m "or" j >= T - n) A_(h,T,j) > delta

    m: sinks, n: recent. There is no budget: a lazy layer holds m + n tokens per KV head; any other layer holds the
    whole prompt.

    threshold: delta; 1 makes no layer lazy. sinks: first tokens. recent: newest tokens, including the last token.
    Source: Zhang et al. 2024, arXiv 2410.13846, section 3.
    """

    sets_budget: ClassVar[bool] = True
    needs = Needs(window=1)

    threshold: float = 0.9
    sinks: int = 4
    recent: int = 1024

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0, 1)
        whole_number("sinks", self.sinks, 0)
        whole_number("recent", self.recent, 1)

    @property
    def exact(self) -> bool:
        return False

    @property
    def cascades(self) -> bool:
        return True

    def leaves_whole(self, length: int, total: int, layers: int, floor: int) -> bool:
        return length <= self.sinks + self.recent

    def measure(self, observation: Observation, state: State) -> Tensor:
        """[B,1]: the share of the last query's attention on sinks and recent tokens."""
        near = observation.first(self.sinks) | observation.newest(self.recent)
        return (observation.window_mean(1) * near).sum(-1).mean(1, keepdim=True)

    def share(self, statistics: Sequence[Sequence[float]], total: int, layers: int, floor: int, cap: int) -> list[int]:
        return [self.sinks + self.recent if lazy > self.threshold else cap for (lazy,) in statistics]

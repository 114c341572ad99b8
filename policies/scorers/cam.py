"""CaM's eviction: keep the first and the newest tokens, each half of the budget."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kvbench.policies.checks import count_or
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.attention_sums import AttentionSums
from kvbench.policies.scorers.streaming import BY_POSITION


@dataclass(frozen=True)
class CaM(AttentionSums):
    """Keep the first `sinks` tokens ("half" = floor(budget / 2)) and the newest of the rest.

        s_j = j, "kept in any case:" j < sinks

    It ranks tokens by position, as `streaming` does, and accumulates attention for its merger.

    sinks: a count, or "half" = floor(budget / 2).
    Source: Zhang et al. 2024, "CaM: Cache Merging for Memory-efficient LLMs Inference"; its code keeps a tenth of the
    prompt at either end.
    """

    needs = replace(AttentionSums.needs, unweighable=BY_POSITION)

    sinks: int | Literal["half"] = "half"

    def __post_init__(self) -> None:
        count_or("half", "sinks", self.sinks, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=budget // 2 if self.sinks == "half" else self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.positions.float()

"""H2O: heavy hitters by accumulated attention, and a recent window."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.policies.checks import count_or
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.attention_sums import AttentionSums


@dataclass(frozen=True)
class H2O(AttentionSums):
    """Keep the tokens that received most attention from all queries so far, including their own, and a recent window.

        s_j = 1 / G sum_(h in "group") sum_(q >= j) A_(h,q,j)

    recent: number of newest tokens that are always kept, a count or "half" = floor(budget / 2). accumulate: false sums
    over the queries of the current block only. by_age: divide by the number of queries that could see the token, which
    removes the bias towards old tokens.
    Source: Zhang et al. 2023, arXiv 2306.14048, algorithm 1.
    """

    recent: int | Literal["half"] = "half"
    accumulate: bool = True
    by_age: bool = False

    def __post_init__(self) -> None:
        count_or("half", "recent", self.recent, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=budget // 2 if self.recent == "half" else self.recent)

    def observe(self, observation: Observation, state: State) -> None:
        if not self.accumulate:
            begins = on_device(observation.sequences.opens, observation.keys.device)
            state["attention_sum"].masked_fill_(begins[:, None, None, None], 0.0)
        super().observe(observation, state)

    def raw(self, observation: Observation, state: State) -> Tensor:
        total = super().raw(observation, state)
        if not self.by_age:
            return total
        age = observation.seen[:, None, None] - observation.positions
        return total / age.clamp(min=1)[:, :, None]

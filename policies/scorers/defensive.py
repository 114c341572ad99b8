"""DefensiveKV: score a token by the most attention that any query of the window pays to it, with a lower bound.

Shapes: B batch, H_kv KV heads, G query heads per KV head, w queries of the window, T slots.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policies.checks import check_choices, choice, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import check_kernel, smooth
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Defensive(Scorer):
    """Keep the tokens that at least one query of the window needs; no token scores below the mean of its head.

        P_(h,q,j) = c_(h,q) "avg-pool"_j A_(h,q,j), "with" c_(h,q) "so that" sum_(j in C) P = sum_(j in C) A
        m_j = max_(h in "group", q in "window") P_(h,q,j)
        s_j = max(m_j, 1 / |C| sum_(i in C) m_i)

    C are the tokens before the window. The maximum estimates the worst case: how important a token may become for a
    later query. The lower bound leaves tokens without attention to the comparison of their values.

    window: number of newest queries, which score and are kept. kernel: odd number of pooled neighbours. aggregate:
    `max`, or the `mean` over group and window as in SnapKV. floor: false omits the lower bound.
    Source: Feng et al. 2025, arXiv 2510.13334; pooling and lower bound follow its code.
    """

    window: int = 32
    kernel: int = 5
    aggregate: Literal["max", "mean"] = "max"
    floor: bool = True

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        check_kernel(self.kernel)
        check_choices(self)
        choice("floor", self.floor, True, False)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, never_negative=True)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window, others=1)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.once(self, lambda: self._bounded(observation))

    def _bounded(self, observation: Observation) -> Tensor:
        among = observation.occupied & ~observation.newest(self.window)
        rows = observation.window_attention(self.window)  # [B,H_kv,G,w,T]
        pooled = smooth(rows, observation, self.window, self.kernel, "avg")
        inside = among[:, :, None, None]
        total, spread = ((x * inside).sum(-1, keepdim=True) for x in (rows, pooled))
        pooled = pooled * (total / spread.clamp(min=torch.finfo(spread.dtype).tiny))
        found = pooled.amax((2, 3)) if self.aggregate == "max" else pooled.mean((2, 3))
        if not self.floor:
            return found
        least = (found * among).sum(-1, keepdim=True) / among.sum(-1, keepdim=True).clamp(min=1)
        return torch.maximum(found, least)

"""SnapKV: keep tokens that the observation window at the end attends to, pooled over neighbours."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.policies.checks import check_choices, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import Pool, check_kernel, smooth
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class SnapKV(AttentionScorer):
    """Keep the tokens that the newest `window` queries attend to, pooled over `kernel` neighbours, and the window.

        a_j = 1 / G sum_(h in "group") sum_(q in "window") A_(h,q,j)
        s_j = max_(|i - j| <= floor(kernel / 2)) a_i

    Attention is summed over the window and averaged over the query heads of a group, then pooled over the candidates
    (everything before the window) in order of position. Scores of window tokens are not pooled; a value-aware wrapper
    may need them.

    window: number of newest queries, which score and are kept; 0 only with the pre-pass `Lookahead`. kernel: odd number
    of pooled neighbours. pool: `max` (the largest neighbour), `avg` (their mean) or `none`. aggregate: `mean` as above,
    or `max`, the largest attention of any query of the window and head of the group, as in SpecKV (arXiv 2506.08373).
    Source: Li et al. 2024, arXiv 2404.14469, listing 1; window 32 and max-pool 7 follow its LongBench runs.
    """

    window: int = 32
    kernel: int = 7
    pool: Pool = "max"
    aggregate: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        whole_number("window", self.window, 0)
        check_kernel(self.kernel)
        check_choices(self)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, never_negative=True, lookahead=self.window == 0)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def raw(self, observation: Observation, state: State) -> Tensor:
        if self.aggregate == "max":
            return observation.window_attention(self.window).amax(-2)
        return observation.window_sums(self.window)

    def score(self, observation: Observation, state: State) -> Tensor:
        if self.aggregate == "max":
            return observation.once(self, lambda: self.finish(self.raw(observation, state).amax(2), observation))
        return observation.once(self, lambda: self.finish(observation.window_mean(self.window), observation))

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        return smooth(raw, observation, self.window, self.kernel, self.pool)

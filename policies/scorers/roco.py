"""RoCo: evict tokens of low mean attention, unless their attention has a large standard deviation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.selection import select
from kvbench.policies.checks import number, whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


def mean_and_deviation(sums: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a token's attention from `count` queries, from its moments; any shape."""
    count = count.clamp(min=1)
    mean = sums / count
    return mean, (squares / count - mean.square()).clamp(min=0).sqrt()


def largest(values: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
    """The counts [B,H_kv] largest of the values >= 0 at positions >= 0, both [B,H_kv,T]; ties: the lower position."""
    return select(values, None, positions, torch.zeros_like(positions, dtype=torch.bool), counts)


@dataclass(frozen=True)
class RoCo(Scorer):
    """Keep the tokens with the highest mean attention since they were appended and those with the largest deviation.

        mu_j = a_j / c_j, sigma_j = sqrt(b_j / c_j - mu_j^2), c_j = "queries since" j "entered"
        a_j = sum_q A_(q,j), b_j = sum_q A_(q,j)^2

    Only b - floor("share" b) - sinks tokens of a budget b are candidates, those of the smallest deviation: all others
    stay. The newest and the first tokens are counted among these others, as if their deviation were infinite. If the
    whole prompt is evicted at once, the deviation is not used. Attention is averaged over the query heads of a group
    before it is squared.

    sinks: number of first tokens that are kept while a prompt is evicted. recent: number of newest tokens that are
    always kept. block_share: the share while a prompt is evicted block by block. decode_share: the share while decoding
    (without sinks).
    Source: Ren and Zhu 2024, arXiv 2402.06262, and the defaults of its code (EasyKV); one-shot eviction is ours.
    """

    needs = Needs(
        statistics=("attention_mean", "attention_square"), sums="moments", newest_row=True, never_negative=True
    )

    sinks: int = 4
    recent: int = 10
    block_share: float = 0.1
    decode_share: float = 0.3

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)
        whole_number("recent", self.recent, 0)
        number("block_share", self.block_share, 0, below=1)
        number("decode_share", self.decode_share, 0, below=1)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.recent, others=self.sinks)

    def observe(self, observation: Observation, state: State) -> None:
        drawn = observation.moments()
        state["attention_mean"] += drawn.sums[..., None]
        state["attention_square"] += drawn.squares[..., None]

    def _queries_since(self, observation: Observation) -> Tensor:
        """Number of queries since a token was appended, including its own: [B,H_kv,T]."""
        return observation.seen[:, None, None] - observation.positions

    def spares(self, observation: Observation, state: State, protected: Tensor) -> Tensor | None:
        prompt = observation.phase != "decode"
        forced = protected | observation.first(self.sinks) if prompt else protected
        if observation.phase == "prompt":
            return forced
        share, sinks = (self.block_share, self.sinks) if prompt else (self.decode_share, 0)
        budgets = observation.sequences.budgets
        stored = observation.occupied.sum(-1)  # [B,H_kv]
        going = stored - on_device(tuple(budgets), stored.device)[:, None]
        candidates = tuple(budget - math.floor(share * budget) - sinks for budget in budgets)
        staying = stored - torch.maximum(on_device(candidates, stored.device)[:, None], going)
        counts = (staying - forced.sum(-1)).clamp(min=0)
        sums, squares = state["attention_mean"][..., 0], state["attention_square"][..., 0]
        _, deviation = mean_and_deviation(sums, squares, self._queries_since(observation))
        return forced | largest(deviation, observation.positions.masked_fill(forced, -1), counts)

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["attention_mean"][..., 0] / self._queries_since(observation).clamp(min=1)

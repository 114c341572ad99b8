"""LagKV: keep tokens that vary most relative to the tokens that follow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import whole_number
from kvbench.policies.mergers.merger import in_order
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class LagKV(Scorer):
    """From every `lag` tokens, keep the tokens with the largest variation on the scale of the next `lag` tokens.

        x_j = (k_j - min_R) / (max_R - min_R), R = "the next partition, per channel"
        a_j = exp(std_D(x_j)) / (sum_(i in P) exp(std_D(x_i))), P = "the partition of" j
        s_j = rank_P((a_j("keys") + a_j("values")) / 2) / lag

    Partitions start after the sinks and follow the stored tokens in order. The last partition and the remaining tokens
    have no reference: they score above all others, and newer tokens score higher. The same holds for prompts with fewer
    than two partitions.

    lag: tokens per partition. sinks: number of first tokens that are always kept.
    Source: Liang et al. 2025, arXiv 2504.04704, section 3.
    """

    needs = Needs(keys=True, whole_prompt=True, never_negative=True)

    lag: int = 128
    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("lag", self.lag, 2)
        whole_number("sinks", self.sinks, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        slots, present = in_order(observation.occupied, observation.positions)
        place = torch.arange(slots.shape[-1], device=slots.device)
        count = present.sum(-1, keepdim=True)
        score = 1 + place / count.clamp(min=1)
        partitions = (len(place) - self.sinks) // self.lag
        if partitions >= 2:
            judged = slice(self.sinks, self.sinks + (partitions - 1) * self.lag)
            referred = (place[judged] - self.sinks) // self.lag * self.lag + self.sinks + 2 * self.lag
            both = self._relative(take(observation.keys, slots), partitions)
            both = both + self._relative(take(observation.values, slots), partitions)
            ranks = both.argsort(dim=-1, stable=True).argsort(dim=-1).flatten(2) / self.lag
            score[..., judged] = torch.where(referred <= count, ranks, score[..., judged])
        return score.new_zeros(observation.positions.shape).scatter_(-1, slots, score)

    def _relative(self, vectors: Tensor, partitions: int) -> Tensor:
        """a of keys or values [B,H,T,D] in order of position: [B,H,partitions-1,lag]."""
        parts = widen(vectors[:, :, self.sinks : self.sinks + partitions * self.lag]).unflatten(2, (partitions, -1))
        reference = parts[:, :, 1:]
        least, most = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)
        span = (most - least).clamp(min=torch.finfo(parts.dtype).eps)
        spread: Tensor = ((parts[:, :, :-1] - least) / span).std(-1)
        return spread.softmax(-1)

"""Compactor: keep keys of high leverage and tokens that receive attention from their chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.checks import number, whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.leverage import Leverage
from kvbench.policies.scorers.noncausal import NonCausal
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Compactor(Scorer):
    """Sum of leverage and non-causal attention, both standardised over the layer; it needs no question.

        s_j = lambda "leverage"_j + "noncausal"_j, lambda = 1 - b / T

    Both are computed without the first `first` and the newest `newest` tokens, which are always kept. lambda is the
    share of the T tokens seen that is evicted at the layer's budget b.

    first, newest: numbers of tokens that are always kept. blend: lambda; null uses the share. chunk: tokens per chunk
    of the attention. sketch: columns of the leverage's Phi. seed: seed of Phi. official: compute the attention as
    kvpress's code does.
    Source: Chari and Van Durme 2025, arXiv 2507.08143, section 3; this lambda follows kvpress.
    """

    first: int = 8
    newest: int = 4
    blend: float | None = None
    chunk: int = 256
    sketch: int = 48
    seed: int = 0
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("first", self.first, 0)
        whole_number("newest", self.newest, 0)
        if self.blend is not None:
            number("blend", self.blend, 0)
        self._parts()  # checks the other fields

    @property
    def needs(self) -> Needs:
        return Needs(
            model=True,
            window=NonCausal.needs.window,
            window_decoding=NonCausal.needs.window_decoding,
            statistics=NonCausal.needs.statistics,
            whole_prompt=True,
        )

    def protects(self, budget: int) -> Protected:
        return Protected(self.first, self.newest)

    def _parts(self) -> tuple[Leverage, NonCausal]:
        return Leverage(sketch=self.sketch, seed=self.seed), NonCausal(self.chunk, self.official)

    def observe(self, observation: Observation, state: State) -> None:
        self._parts()[1].judge(observation, state, self.first, self.newest)

    def score(self, observation: Observation, state: State) -> Tensor:
        leverage, noncausal = self._parts()
        outside = observation.first(self.first) | observation.newest(self.newest)
        counted = observation.occupied & ~outside
        if self.blend is None:
            blend = 1 - on_device(observation.sequences.budgets, outside.device) / observation.seen
        else:
            blend = torch.full_like(observation.seen, self.blend, dtype=torch.float32)
        standing_out = leverage.among(observation, counted)
        return blend[:, None, None] * standing_out + noncausal.smoothed(observation, state, counted)

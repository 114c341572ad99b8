"""Random eviction: the floor every policy has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's 64-bit linear congruential step


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform draw in [0,1) per (seed, layer, KV head, position): a token keeps its draw, so nothing is drawn twice.

    The draw is a hash, not a generator's next number: it depends neither on the batch nor on how the prompt was split.
    """

    seed: int = 0

    def score(self, observation: Observation, state: State) -> Tensor:
        positions = observation.positions.long()
        heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
        mixed = positions + 1
        for salt in (self.seed, observation.layer, heads):
            mixed = (mixed + salt) * MULTIPLIER + INCREMENT  # int64 wraps around, as intended
            mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
        return ((mixed >> 24) & 0xFFFFFF).float() / 2**24

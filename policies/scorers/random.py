"""Random eviction: a baseline for every policy."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.draws import combined_seed, uniform_draws
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform draw in [0,1) per (seed, layer, KV head, position); the draw of a token never changes.

        s_j = u("seed", "layer", "head", j), 0 <= u < 1

    The draw is a hash, not a generator's next number: it depends neither on the batch nor on how the prompt was split.
    A benchmark run uses different draws for every example and sampled answer (`for_example`).

    seed: seed of the draws. recent: newest tokens that are always kept, such as the question's.
    """

    needs = Needs(layer=True, fixed_scores=True)

    seed: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, 0)
        whole_number("recent", self.recent, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.recent)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.once(self, lambda: uniform_draws(self.seed, observation.layer, observation.positions))

    def for_example(self, run_seed: int, example: int) -> Self:
        return replace(self, seed=combined_seed(self.seed, run_seed, example))

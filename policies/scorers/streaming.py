"""StreamingLLM and the local window: keep tokens by position."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

BY_POSITION = "ranks tokens by position, so there are no scores for a value-aware wrapper"


@dataclass(frozen=True)
class Streaming(Scorer):
    """Keep the first `sinks` tokens and the newest of the rest; sinks = 0 is a local window.

        s_j = j, "kept in any case:" j < sinks

    Tokens keep their original positions.

    sinks: number of first tokens that are always kept; 0 is a local window.
    Source: Xiao et al. 2023, arXiv 2309.17453, section 3.2.
    """

    needs = Needs(unweighable=BY_POSITION)

    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.once(self, observation.positions.float)

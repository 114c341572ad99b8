"""SirLLM: the tokens the model itself did not expect."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.surprisal import Surprisal
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class SirLLM(Scorer):
    """Keep the first `sinks` tokens and those of greatest surprisal, -log p(token | all before it); no recent window.

        s_j = -log p(x_j "|" x_(<j))

    One number per token, so that all layers and heads keep the same set. It comes from the model's logits, which no
    layer sees: a pre-pass of our own loop. The very first token has none and counts 0.

    sinks: first tokens, always kept.
    Source: Yao et al. 2024, arXiv 2405.12528, section 3, without its decay between the rounds of a dialogue.
    """

    needs = Needs(whole_prompt=True)
    pre_pass = Surprisal()

    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)

    @property
    def least_budget(self) -> int:
        return self.sinks + 1

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["surprisal"][..., 0]

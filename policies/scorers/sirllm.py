"""SirLLM: keep the tokens that the model did not expect."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.surprisal import Surprisal
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class SirLLM(Scorer):
    """Keep the first `sinks` tokens and the tokens of greatest surprisal, -log p(token | prefix); no recent window.

        s_j = -log p(x_j "|" x_(<j))

    Each token has one score, so all layers and heads keep the same set. The score is computed from the model's logits
    by a pre-pass of kvbench's generation loop, because layers do not see logits. The first token has no surprisal and
    gets 0.

    sinks: number of first tokens that are always kept.
    Source: Yao et al. 2024, arXiv 2405.12528, section 3, without its decay between the rounds of a dialogue.
    """

    needs = Needs(whole_prompt=True)
    pre_pass = Surprisal()

    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks, others=1)

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["surprisal"][..., 0]

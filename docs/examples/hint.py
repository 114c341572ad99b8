"""A pre-pass that appends a hint to the prompt and measures its attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.references import attention_logits
from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, PrePass, TextEncoder
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Hint(ExtraPasses):
    """Attention to every token from a text that is appended to the prompt and not stored."""

    statistics = ("hinted",)

    text: str

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return [Pass(encoder.encode(self.text), range(len(prompt)))]

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        logits = attention_logits(step.queries, step.keys, step.params.scaling)  # [1,H_kv,G,n,T]; all visible
        state["hinted"].copy_(logits.softmax(-1).mean((2, 3))[..., None])


@dataclass(frozen=True)
class Hinted(Scorer):
    """Keep the first `sinks` tokens and the tokens that a hint's queries attend to.

        s_j = mean_(h in "group", q in "hint") A_(h,q,j)

    text: the hint. sinks: number of first tokens that are always kept.
    """

    needs = Needs(whole_prompt=True, never_negative=True)

    text: str = " What is the secret number?"
    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)

    @property
    def pre_pass(self) -> PrePass:
        return Hint(self.text)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["hinted"][..., 0]

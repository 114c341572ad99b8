"""KVzip: keep tokens that the model attends to when the prompt is repeated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.pre_passes.repetition import Repetition
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KVzip(Scorer):
    """Keep the first `sinks` tokens and the tokens that receive the most attention while the prompt is repeated.

        s_j = max_(h in "group", q in "repeated prompt") A_(h,q,j)

    The score does not depend on a question: after prefill, the prompt (with compress=context, the context) is repeated
    in extra passes that are not stored (`Repetition`). Decoded tokens are not repeated; they get the highest score.

    sinks: number of first tokens that are always kept. chunk: prompt tokens per repetition pass.
    Source: Kim et al. 2025, arXiv 2505.23416, sections 3.2 and 3.3.
    """

    needs = Needs(whole_prompt=True, never_negative=True, fixed_scores=True)

    sinks: int = 4
    chunk: int = 2048

    def __post_init__(self) -> None:
        _ = self.pre_pass  # checks both fields

    @property
    def pre_pass(self) -> PrePass:
        return Repetition(self.chunk, self.sinks)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks, others=1)

    def score(self, observation: Observation, state: State) -> Tensor:
        drawn = state["repeated"][..., 0]
        if observation.phase != "decode":
            return drawn
        prompts = on_device(observation.sequences.prompts, drawn.device)[:, None, None]
        return torch.where(observation.positions >= prompts, drawn.amax(-1, keepdim=True), drawn)

"""KVCompose: keep tokens that the model attends to when it reads the prompt again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.positions import sum_over_heads
from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.pre_passes.second_reading import SecondReading
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KVCompose(Scorer):
    """Keep the tokens that receive the most attention in a second reading, in their head and in the heads of the layer.

        s_(g,j) = a_(g,j) + 1 / H sum_(g') a_(g',j), a_(g,j) = 1 / G sum_(h in "group") max_q A_(h,q,j)

    The queries q are those of the whole prompt, which is processed again and not stored. No token is protected. Decoded
    tokens get the highest score.

    Source: arXiv 2509.05165; the second reading follows its code, kvpress's KVComposePress.
    """

    needs = Needs(whole_prompt=True, never_negative=True)

    @property
    def pre_pass(self) -> PrePass:
        return SecondReading()

    def score(self, observation: Observation, state: State) -> Tensor:
        drawn = state["read_again"][..., 0]
        found = drawn + sum_over_heads(drawn, observation) / drawn.shape[1]
        if observation.phase != "decode":
            return found
        prompts = on_device(observation.sequences.prompts, found.device)[:, None, None]
        return torch.where(observation.positions >= prompts, found.amax(-1, keepdim=True), found)

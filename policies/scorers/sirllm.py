"""SirLLM: the tokens the model itself did not expect."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class SirLLM(Scorer):
    """Keep the first `sinks` tokens and those of greatest surprisal, -log p(token | all before it); no recent window.

        s_j = -log p(x_j "|" x_(<j))

    One number per token, so that all layers and heads keep the same set. It comes from the model's logits, which no
    layer sees: our own generation hands it over (`observation.shared["surprisal"]`, [B,M] for this step's tokens) once
    the prompt is in, and with each decoded token. The very first token has none and counts 0.

    sinks: first tokens, always kept.
    Source: Yao et al. 2024, arXiv 2405.12528, section 3, without its decay between the rounds of a dialogue.
    """

    needs = Needs(surprisal=True, statistics=("surprisal",), whole_prompt=True)

    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)

    @property
    def least_budget(self) -> int:
        return self.sinks + 1

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def observe(self, observation: Observation, state: State) -> None:
        given = observation.shared.get("surprisal")
        if given is None:  # at the end of a prompt, whose logits are not known yet
            return
        given = given.to(observation.positions.device)  # of a model on several devices
        real = observation.query_positions >= 0
        column = real.to(torch.uint8).argmax(-1, keepdim=True)  # [B,1] where a sequence's own tokens begin
        first = observation.query_positions.gather(-1, column)
        entered = observation.positions - first[..., None]  # [B,H_kv,T] its place among this step's tokens
        columns = (entered + column[..., None]).clamp(0, given.shape[-1] - 1).long()
        surprisal = given[:, None].expand(-1, columns.shape[1], -1).gather(-1, columns)
        new = observation.occupied & (entered >= 0) & real.any(-1)[:, None, None]
        state["surprisal"].copy_(torch.where(new[..., None], surprisal[..., None], state["surprisal"]))

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["surprisal"][..., 0]

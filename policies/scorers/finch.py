"""FINCH: what the question of a prompt attends to, each of its queries by how much it could attend to.

Shapes: B batch, H_kv KV heads, G query heads per KV head, w queries of the question, T slots.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policies.checks import choice, whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.pre_passes.question import Question, put
from kvbench.policies.scorers.scorer import AttentionScorer
from kvbench.policies.windows import question_rows


@dataclass(frozen=True)
class Finch(AttentionScorer):
    """Keep the question and what its queries attend to, each query weighted by the number of tokens it sees.

        s_j = 1 / (G w) sum_(h in "group") sum_(q in "question") c_q A_(h,q,j), c_q = "tokens that q sees"

    The question, w tokens inside the prompt, is told (compress=context, which hides it, is refused). Read in blocks
    (`finch_chunks`), as in the paper, each block of the context is read with the question behind it, and what was kept
    so far competes with the block; at once (`finch`), all of the context is one chunk, as in kvpress's FinchPress. What
    stays is rotated to places without gaps (the schedule's `rerotate`). The paper's code has one set for all heads of a
    layer (`policy.granularity=layer`), kvpress's one for each KV head, as here. A token that was decoded, and while
    decoding the question, has the best score there is.

    window: `question`, or so many of the prompt's last tokens in its place, where no task says where a question begins.
    official: c_q counts the tokens before q, as kvpress does, and not q itself.
    Source: Corallo and Papotti 2024, arXiv 2408.00167, section 3.
    """

    window: Literal["question"] | int = "question"
    official: bool = False

    def __post_init__(self) -> None:
        if self.window != "question":
            whole_number("window", self.window, 1)
        choice("official", self.official, True, False)

    @property
    def needs(self) -> Needs:
        if isinstance(self.window, int):
            return Needs(window=self.window, never_negative=True)
        return Needs(question=True, statistics=("asked",), never_negative=True)

    @property
    def pre_pass(self) -> PrePass | None:
        return None if isinstance(self.window, int) else Question(self.official)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window) if isinstance(self.window, int) else Protected()

    def spares(self, observation: Observation, state: State, protected: Tensor) -> Tensor | None:
        told = self.window == "question" and observation.phase != "decode"
        return _asking(observation) if told else None

    def observe(self, observation: Observation, state: State) -> None:
        """Add what the question's queries that were read draw to what those in a pass drew, if some are to come."""
        if self.window != "question" or observation.phase == "decode":
            return
        if observation.last is not None and observation.last < min(observation.questions):
            return  # none was read: a pass found it all
        rows, asked = question_rows(observation)
        put(own := torch.zeros_like(state["asked"]), self._weighed(observation, rows, asked))
        device = own.device
        coming = observation.seen.to(device) < on_device(observation.prompts, device)
        state["asked"].mul_(coming[:, None, None, None]).add_(own)

    def raw(self, observation: Observation, state: State) -> Tensor:
        if isinstance(self.window, int):
            rows = observation.window_attention(self.window)  # [B,H_kv,G,w,T], 0 for padding
            every = torch.ones(rows.shape[0], rows.shape[3], dtype=torch.bool, device=rows.device)
            return self._weighed(observation, rows, every) / self.window
        words = [end - begin for begin, end in zip(observation.questions, observation.prompts, strict=True)]
        drawn = state["asked"].mT / on_device(tuple(words), state["asked"].device)[:, None, None, None]
        if observation.phase != "decode":
            return drawn
        return torch.where(_asking(observation)[:, :, None], drawn.amax(-1, keepdim=True), drawn)

    def _weighed(self, observation: Observation, rows: Tensor, asked: Tensor) -> Tensor:
        """Rows [B,H_kv,G,w,T] summed over those that ask, bool [B,w], each times the tokens that its query sees."""
        places = observation.recent_positions
        assert places is not None, "the window is declared"
        places = places[:, None, -rows.shape[3] :, None]
        seen = observation.occupied[:, :, None] & (observation.positions[:, :, None] <= places)
        counts = (seen.sum(-1) - int(self.official)) * asked[:, None]
        return torch.einsum("bhgwt,bhw->bhgt", rows, counts.to(rows.dtype))


def _asking(observation: Observation) -> Tensor:
    """Tokens of the question and all after it, bool [B,H_kv,T]."""
    return observation.positions >= on_device(observation.questions, observation.positions.device)[:, None, None]

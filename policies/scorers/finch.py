"""FINCH: keep tokens that the prompt's question attends to, with queries weighted by the number of visible tokens.

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
    """Keep the question and the tokens it attends to; each query is weighted by the number of tokens it sees.

        s_j = 1 / (G w) sum_(h in "group") sum_(q in "question") c_q A_(h,q,j), c_q = "tokens that q sees"

    The policy needs the question, w tokens inside the prompt (compress=context hides it and is rejected). In blocks
    (`finch_chunks`), as in the paper, each block of the context is prefilled with the question after it, and the tokens
    kept so far compete with the block. In one pass (`finch`), the whole context is one chunk, as in kvpress's
    FinchPress. Kept tokens are rotated to positions without gaps (the schedule's `rerotate`). The paper's code keeps
    one token set for all heads of a layer (`policy.granularity=layer`); kvpress keeps one per KV head, as here. Decoded
    tokens, and the question while decoding, get the highest score.

    window: `question`, or a number of last prompt tokens to use instead, for tasks that do not mark the question.
    official: c_q counts only the tokens before q, as kvpress does, and not q itself.
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
        return Needs(question=True, statistics=("question_attention",), never_negative=True)

    @property
    def pre_pass(self) -> PrePass | None:
        return None if isinstance(self.window, int) else Question(self.official)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window) if isinstance(self.window, int) else Protected()

    def spares(self, observation: Observation, state: State, protected: Tensor) -> Tensor | None:
        spares = self.window == "question" and observation.phase != "decode"
        return _question_tokens(observation) if spares else None

    def observe(self, observation: Observation, state: State) -> None:
        """Add the attention of the question's prefilled queries to the attention of the queries in a pass, if any."""
        if self.window != "question" or observation.phase == "decode":
            return
        if observation.sequences.last is not None and observation.sequences.last < min(observation.sequences.questions):
            return  # no query was prefilled: the pass computed all of the attention
        rows, valid = question_rows(observation)
        put(own := torch.zeros_like(state["question_attention"]), self._weighed(observation, rows, valid))
        device = own.device
        unfinished = observation.seen.to(device) < on_device(observation.sequences.prompts, device)
        state["question_attention"].mul_(unfinished[:, None, None, None]).add_(own)

    def raw(self, observation: Observation, state: State) -> Tensor:
        if isinstance(self.window, int):
            rows = observation.window_attention(self.window)  # [B,H_kv,G,w,T], 0 for padding
            every = torch.ones(rows.shape[0], rows.shape[3], dtype=torch.bool, device=rows.device)
            return self._weighed(observation, rows, every) / self.window
        words = [
            end - begin
            for begin, end in zip(observation.sequences.questions, observation.sequences.prompts, strict=True)
        ]
        sums = state["question_attention"].mT
        drawn = sums / on_device(tuple(words), sums.device)[:, None, None, None]
        if observation.phase != "decode":
            return drawn
        return torch.where(_question_tokens(observation)[:, :, None], drawn.amax(-1, keepdim=True), drawn)

    def _weighed(self, observation: Observation, rows: Tensor, valid: Tensor) -> Tensor:
        """Rows [B,H_kv,G,w,T] summed over the question's queries, bool [B,w], times the number of visible tokens."""
        assert observation.window is not None, "the scorer declares a window"
        places = observation.window.positions[:, None, -rows.shape[3] :, None]
        seen = observation.occupied[:, :, None] & (observation.positions[:, :, None] <= places)
        counts = (seen.sum(-1) - int(self.official)) * valid[:, None]
        return torch.einsum("bhgwt,bhw->bhgt", rows, counts.to(rows.dtype))


def _question_tokens(observation: Observation) -> Tensor:
    """Tokens of the question and all tokens after it, bool [B,H_kv,T]."""
    return (
        observation.positions >= on_device(observation.sequences.questions, observation.positions.device)[:, None, None]
    )

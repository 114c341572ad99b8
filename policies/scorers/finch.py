"""FINCH: what the question at a prompt's end attends to, each query by how much it could attend to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.checks import choice, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class Finch(AttentionScorer):
    """Keep what the question's queries attend to, each weighted by the number of tokens it sees, and the question.

        s_j = 1 / (G w) sum_(h in "group") sum_(q in "question") c_q A_(h,q,j), c_q = "tokens that q sees"

    The question is taken to be the prompt's last `window` tokens: no policy is told where it begins, so set the window
    near the length of the task's questions. What stays is rotated to places without gaps (the schedule's `rerotate`).

    window: tokens of the question, which score and are kept. official: c_q counts the tokens before q, as kvpress does,
    and not q itself.
    Source: Corallo and Papotti 2024, arXiv 2408.00167, section 3. It reads the context in chunks, each followed by the
    question; here the prompt is read once, as in kvpress's FinchPress without `chunk_length`.
    """

    window: int = 32
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        choice("official", self.official, True, False)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, never_negative=True)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def raw(self, observation: Observation, state: State) -> Tensor:
        rows = observation.window_attention(self.window)  # [B,H_kv,G,w,T], 0 for padding
        places = observation.recent_positions
        assert places is not None, "the window is declared"
        seen = places[:, -rows.shape[3] :] + (0 if self.official else 1)
        return torch.einsum("bhgwt,bw->bhgt", rows, seen.to(rows.dtype) / self.window)

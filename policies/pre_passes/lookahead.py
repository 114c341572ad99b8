"""Lookahead: the first tokens of an answer are generated before eviction, and their queries score the prompt."""

from dataclasses import dataclass
from typing import Literal

from kvbench.policies.checks import check_choices, choice, whole_number
from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.scorers.snapkv import SnapKV


@dataclass(frozen=True)
class Lookahead(PrePass):
    """Queries of the first tokens of the answer, in addition to those of the scorer's observation window.

        t_0 = argmax "logits after the prompt", t_(i+1) = argmax "logits after" t_i

    The tokens t_0, t_1, ... are processed one by one before the prompt is evicted. Their queries attend to all of the
    prompt when the scorer sees them; keys, values and text are dropped, and the answer begins anew. EOS ends the
    lookahead, except as its first token. The passes continue the prompt, so compress=context, which has no question,
    is refused.

    tokens: the most tokens to generate. draft: tokens of the prompt that they attend to while they are generated:
    `evicted` those that SnapKV keeps at the budget, `full` all. draft_window: SnapKV's window, in newest queries.
    softmax: tokens over which a query's attention is normalised: those of the `prompt`, or `all`, the generated ones
    included. official: scores mask tokens as if the queries were the last ones of the prompt, as in the code of LAQ.
    Source: arXiv 2505.20334 (LAQ), sections 3 and 4; draft=full and softmax=all are SpecKV (arXiv 2506.08373), with the
    model itself as the draft model.
    """

    tokens: int = 8
    draft: Literal["evicted", "full"] = "evicted"
    draft_window: int = 32
    softmax: Literal["prompt", "all"] = "prompt"
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, 1)
        whole_number("draft_window", self.draft_window, 1)
        check_choices(self)
        choice("official", self.official, True, False)

    @property
    def drafter(self) -> Scorer | None:
        """Selects the tokens of the prompt to attend to; None: all of them."""
        return None if self.draft == "full" else SnapKV(self.draft_window)

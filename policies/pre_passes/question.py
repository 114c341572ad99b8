"""The question, processed after each block of its context.

Shapes: H_kv KV heads, G query heads per KV head, n tokens of a pass, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import BlockPasses, Pass, PassStep


@dataclass(frozen=True)
class Question(BlockPasses):
    """Attention of the question's queries to every token before the question is prefilled.

        a_j = sum_(q in "question") c_q A_(h,q,j), c_q = "tokens that q sees"

    The question, or the rest of it, is processed after the block and is not stored.

    official: c_q counts only the tokens before q, without q.
    """

    statistics = ("question_attention",)

    official: bool = False

    def passes_after(self, prompt: Sequence[int], processed: int, question: int) -> list[Pass]:
        return [Pass(list(prompt[max(processed, question) :]), range(processed))]

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        slots = torch.arange(step.keys.shape[2], device=step.keys.device).expand(step.positions.shape)
        stored = (step.positions >= 0).sum(-1)[:, :, None]  # [1,H_kv,1]
        counts = stored + torch.arange(len(one.tokens), device=stored.device) + int(not self.official)  # [1,H_kv,n]
        drawn, begin = widen(step.values.new_zeros(())), 0
        for weights in step.rows(slots):
            seen = counts[:, :, begin : begin + weights.shape[3]].to(weights.dtype)
            drawn = drawn + torch.einsum("bhgnt,bhn->bhgt", weights[..., : slots.shape[-1]], seen)
            begin += weights.shape[3]
        put(state["question_attention"], drawn)


def put(statistic: Tensor, drawn: Tensor) -> None:
    """Write numbers [B,H_kv,G,T] to a statistic [B,H_kv,T,G'] in place; averaged over the group if G' = 1."""
    drawn = drawn.mT if statistic.shape[-1] == drawn.shape[2] else drawn.mean(2)[..., None]
    statistic.copy_(drawn)

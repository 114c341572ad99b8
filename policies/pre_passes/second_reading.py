"""A second reading: the prompt is processed again, to measure which of its tokens the model attends to.

Shapes: H_kv KV heads, G query heads per KV head, T prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, TextEncoder


@dataclass(frozen=True)
class SecondReading(ExtraPasses):
    """The largest attention of each query head to a token while the prompt follows itself, averaged over the group.

        a_j = 1 / G sum_(h in "group") max_(q in "second reading") A_(h,q,j)

    The softmax is over the prompt and the tokens of the second reading up to the query.
    """

    statistics = ("read_again",)

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return [Pass(list(prompt), range(len(prompt)))]

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        slots = torch.arange(step.keys.shape[2], device=step.keys.device).expand(step.positions.shape)
        most = None
        for weights in step.rows(slots):
            drawn = weights[..., : slots.shape[-1]].amax(3)  # [1,H_kv,G,T]
            most = drawn if most is None else torch.maximum(most, drawn)
        assert most is not None
        state["read_again"].copy_(most.mean(2)[..., None])

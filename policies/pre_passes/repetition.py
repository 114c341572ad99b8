"""Repetition: the prompt is repeated in chunks to measure which of its tokens the model attends to.

Shapes: H_q query heads, H_kv KV heads, G = H_q / H_kv, n tokens of a pass, m of its chunk, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, TextEncoder

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens before a later chunk that mark its start


@dataclass(frozen=True)
class Repetition(ExtraPasses):
    """The largest attention weight of a token while the prompt is repeated chunk by chunk.

        a_j = max_(h in "group", q in "pass") A_(h,q,j)

    The softmax is over the sinks, the chunk's own tokens and the pass's tokens up to the query. A pass contains a
    request to repeat (from the second chunk on, with the 8 tokens before the chunk), the end of the user's turn, and
    the chunk.

    chunk: prompt tokens per pass. sinks: number of first tokens that are visible to every pass.
    """

    statistics = ("repeated",)

    chunk: int = 2048
    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("chunk", self.chunk, 1)
        whole_number("sinks", self.sinks, 0)

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        end = encoder.encode(encoder.turn_end)
        found = []
        for start in range(0, len(prompt), self.chunk):
            request = encoder.encode(LATER if start else FIRST)
            request += prompt[max(0, start - LEAD) : start]
            chunk = prompt[start : start + self.chunk]
            found.append(Pass([*request, *end, *chunk], range(start, start + len(chunk))))
        return found

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        slots = step.slots(one.about)
        looked_at = torch.cat([step.slots(range(min(self.sinks, one.about.start))), slots], dim=-1)
        first = looked_at.shape[-1] - len(one.about)
        drawn = None
        for weights in self.rows(step, looked_at):
            most = weights[..., first : looked_at.shape[-1]].amax((2, 3))  # over group and queries: [1,H_kv,m]
            drawn = most if drawn is None else torch.maximum(drawn, most)
        assert drawn is not None
        state["repeated"].scatter_(2, slots[..., None], drawn.clamp(min=torch.finfo(drawn.dtype).tiny)[..., None])

    def rows(self, step: PassStep, looked_at: Tensor) -> Iterator[Tensor]:
        """Attention [1,H_kv,G,r,slots + n] of some of the pass's queries, over slots [1,H_kv,slots] and the pass."""
        return step.rows(looked_at)

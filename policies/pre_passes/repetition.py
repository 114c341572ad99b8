"""Repetition: the prompt is given again in chunks, and what that looks at is what the model needs of it.

Shapes: H_q query heads, H_kv KV heads, G = H_q / H_kv, n tokens of a pass, m of its chunk, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_logits, beside_sinks
from kvbench.policies.checks import whole_number
from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, TextEncoder

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens before a later chunk that tell where it starts
ROWS = 256  # queries whose attention exists at once


@dataclass(frozen=True)
class Repetition(ExtraPasses):
    """The most attention a token draws while the model is given the prompt again, chunk by chunk.

        a_j = max_(h in "group", q in "pass") A_(h,q,j)

    The softmax is over the sinks, the chunk's own tokens and the pass's tokens up to the query. A pass is a request
    to repeat (with the 8 tokens before the chunk, from the second on), the end of the user's turn, and the chunk.

    chunk: tokens of the prompt in one pass. sinks: first tokens, which every pass may look at.
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
        held = step.keys.gather(2, looked_at[..., None].expand(-1, -1, -1, step.keys.shape[-1]))
        keys, params = torch.cat([held, step.own_keys], dim=2), step.params
        own = step.query_positions[:, None].expand(-1, looked_at.shape[1], -1)
        places = torch.cat([step.positions.gather(2, looked_at), own], dim=2)[:, :, None, None]  # [1,H_kv,1,1,·]
        for queries, at in zip(step.queries.split(ROWS, 2), step.query_positions.split(ROWS, 1), strict=True):
            logits = attention_logits(queries, keys, params.scaling, params.softcap)
            sight = places <= at[:, None, None, :, None]
            if params.sliding_window is not None:
                sight &= places > at[:, None, None, :, None] - params.sliding_window
            logits = logits.masked_fill(~sight, -torch.inf)
            yield logits.softmax(-1) if params.sinks is None else _beside(params.sinks, logits)


def _beside(sinks: Tensor, logits: Tensor) -> Tensor:
    """Weights [1,H_kv,G,r,T] where attention sinks, logits [1,H_q] that hold no token, take their part."""
    left = beside_sinks(logits.logsumexp(-1), sinks.view(1, logits.shape[1], -1, 1))
    return logits.softmax(-1) * left[..., None]

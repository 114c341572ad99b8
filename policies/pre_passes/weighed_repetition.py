"""Repetition with attention scaled by the token's contribution to hidden states.

Shapes: H_q query heads, H_kv KV heads, G = H_q / H_kv, n tokens of a pass, m of its chunk, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.pre_passes.pre_pass import ROWS, PassStep
from kvbench.policies.pre_passes.repetition import Repetition

AT_ONCE = 2**22  # number of projected elements in memory at once


@dataclass(frozen=True)
class WeighedRepetition(Repetition):
    """The largest contribution of a token to a query's hidden state while the prompt is repeated.

        a_j = max_(h in "group", q in "pass") A_(h,q,j) * ||W_O^h v_j|| / ||x_q||

    x_q is the hidden state of the query's token before the layer's attention; W_O^h is the output projection of head h.

    chunk: prompt tokens per pass. sinks: number of first tokens that are visible to every pass.
    """

    reads_layer = True

    def rows(self, step: PassStep, looked_at: Tensor) -> Iterator[Tensor]:
        assert step.hidden is not None
        assert step.params.model is not None
        given = widen(step.hidden).norm(dim=-1)[:, None, None, :, None]  # [1,1,1,n,1]
        projection = step.params.model.output_projection().unflatten(0, (looked_at.shape[1], -1))  # [H_kv,G,D,hidden]
        values = step.values.gather(2, looked_at[..., None].expand(-1, -1, -1, step.values.shape[-1]))
        added = _norms(values, projection)[:, :, :, None]  # [1,H_kv,G,1,slots]
        for index, weights in enumerate(super().rows(step, looked_at)):
            here = slice(index * ROWS, (index + 1) * ROWS)
            yield weights[..., : added.shape[-1]] * added / given[:, :, :, here]


def _norms(values: Tensor, projection: Tensor) -> Tensor:
    """||W_O^h v||, [1,H_kv,G,T], of values [1,H_kv,T,D] under a projection [H_kv,G,D,hidden]."""
    weights = widen(projection)
    some = values.split(max(1, AT_ONCE // (weights.shape[:2].numel() * weights.shape[-1])), dim=2)
    return torch.cat([(widen(part)[:, :, None] @ weights).norm(dim=-1) for part in some], dim=-1)

"""Attention of a store that holds codes: logits and the weighted sum of values come from the store itself.

Shapes: B batch, H KV heads, G query heads per KV head, M queries, r = G * M query rows, C tokens, D head dim.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from kvbench.kernels.references import sink_factor, visible, widen
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.store import LayerStore


class CodeAttention(LayerStore):
    """A layer that computes attention from its codes, in float32 (float64 for a float64 model)."""

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """Scaled queries [B,H,r,D] times the keys: [B,H,r,C]."""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """Weights [B,H,r,C] times the values: [B,H,r,D]."""

    def attended(self, weights: Tensor, positions: Tensor) -> None:
        """Observe the attention weights [B,H,r,C] of queries at positions [B,M]."""

    def attend_codes(self, queries: Tensor, positions: Tensor, how: AttentionParams, heads: int) -> Tensor:
        """Attention [B,H_q,M,D] over the codes of H = `heads` KV heads; arguments as in `attend`."""
        batch, query_heads, new, dim = queries.shape
        logits = self.logits((widen(queries) * how.scaling).reshape(batch, heads, query_heads // heads * new, dim))
        if how.softcap is not None:
            logits = how.softcap * torch.tanh(logits / how.softcap)
        if new == 1 and self.packed and how.sliding_window is None:  # the newest query sees every slot
            weights = logits.softmax(-1)
        else:
            seen = visible(positions, self.positions, how.sliding_window).repeat(1, 1, query_heads // heads, 1)
            nothing = ~seen.any(-1, keepdim=True)
            weights = logits.masked_fill_(~(seen | nothing), -torch.inf).softmax(-1).masked_fill_(nothing, 0.0)
        if how.sinks is not None:
            sinks = how.sinks.view(1, heads, -1).repeat_interleave(new, dim=-1)  # a group's rows are [G,M]
            weights *= sink_factor(logits.logsumexp(-1), sinks)[..., None]
        self.attended(weights, positions)
        return self.mix(weights).view(batch, query_heads, new, -1).to(queries.dtype)

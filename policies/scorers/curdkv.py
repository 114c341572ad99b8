"""CurDKV: keep keys and values with a large share of the squared norm of their window."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import check_choices, whole_number
from kvbench.policies.mergers.merger import in_order
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class CurDKV(Scorer):
    """Keep the tokens with the largest shares of their window's squared norms of keys and values: approximate leverage.

        l_j(X) = ||x_j||^2 / (sum_(i in W) ||x_i||^2), W = "the window of" j
        s_j = l_j(K) l_j(V) / (sum_i l_i(K) l_i(V))

    Windows are counted from the first stored token, in order; the last window may be shorter.

    window: tokens per window. leverage: the leverage of the `key`, of the `value`, their mean (`kv_avg`), or their
    product (`kv_product`). sinks: number of first tokens that are always kept.
    Source: Sengupta et al. 2025, arXiv 2509.15038, section 4; windows instead of a random projection follow kvpress.
    """

    needs = Needs(keys=True, whole_prompt=True, never_negative=True)

    window: int = 16
    leverage: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    sinks: int = 4

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        check_choices(self)
        whole_number("sinks", self.sinks, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def score(self, observation: Observation, state: State) -> Tensor:
        slots, present = in_order(observation.occupied, observation.positions)
        keys, values = (self._share(take(x, slots), present) for x in (observation.keys, observation.values))
        score = {"key": keys, "value": values, "kv_avg": (keys + values) / 2, "kv_product": keys * values}
        found = score[self.leverage]
        found = found / found.sum(-1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)
        return found.new_zeros(observation.positions.shape).scatter_(-1, slots, found)

    def _share(self, vectors: Tensor, present: Tensor) -> Tensor:
        """l of keys or values [B,H,T,D] in order of position: [B,H,T]."""
        squares = widen(vectors).square().sum(-1).masked_fill(~present, 0.0)
        tokens = squares.shape[-1]
        windows = F.pad(squares, (0, -tokens % self.window)).unflatten(-1, (-1, self.window))
        whole = windows.sum(-1, keepdim=True).clamp(min=torch.finfo(squares.dtype).tiny)
        shares: Tensor = (windows / whole).flatten(-2)[..., :tokens]
        return shares

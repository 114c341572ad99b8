"""AdaKV: the KV heads of a layer share its slots in proportion to their high scores.

Shapes: B batch, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.kernels.selection import preference
from kvbench.policies.allocators.allocator import Allocator, StatisticAllocator
from kvbench.policies.allocators.rounding import largest_remainders
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.checks import check_choices, number
from kvbench.policies.constants import on_device
from kvbench.policies.ranking import Ranking


def top_over_heads(ranking: Ranking, eligible: Tensor, counts: Tensor) -> Tensor:
    """Slots per head, [B,H], if all heads of a sequence compete for its counts [B] best eligible slots.

    Ties between heads go to the lower position, then to the lower head.
    """
    batch, heads, slots = ranking.scores.shape
    positions = torch.where(eligible, ranking.positions, -1).transpose(1, 2).reshape(batch, 1, -1)

    def flat(x: Tensor) -> Tensor:  # [B,H,T] -> [B,1,T*H], heads of one slot side by side
        return x.transpose(1, 2).reshape(batch, 1, -1)

    tie_break = None if ranking.tie_break is None else flat(ranking.tie_break)
    order = preference(flat(ranking.scores), tie_break, positions, torch.zeros_like(positions, dtype=torch.bool))[:, 0]
    chosen = torch.arange(slots * heads, device=order.device) < counts[:, None]
    won = torch.zeros(batch, heads, dtype=torch.long, device=order.device)
    return won.scatter_add_(-1, order % heads, chosen.long())


@dataclass(frozen=True)
class Ada(Allocator):
    """Heads compete for a layer's slots: each gets (1 - alpha) of its wins plus alpha of the even share.

        b_h = (1 - alpha) * w_h + alpha * b, sum_h w_h = H * b

    w_h: the number of head h's tokens among the H * b best candidates of all heads. b: the budget per head without
    protected tokens.

    base: the wrapped allocator, which divides the total over the layers. alpha: the weight of the even share. rounding:
    `exact` rounds the heads to the layer's total by largest remainders; `official` truncates and rounds per head as the
    released code does, so the sum may differ from the total by a few slots; `kvpress` always keeps every head's best
    int(alpha * budget) tokens and distributes the rest globally.
    Source: Feng et al. 2024, arXiv 2407.11550, algorithm 1.
    """

    per_head: ClassVar[bool] = True

    base: Allocator = field(default_factory=Uniform)
    alpha: float = 0.2
    rounding: Literal["exact", "official", "kvpress"] = "exact"

    def __post_init__(self) -> None:
        number("alpha", self.alpha, 0, 1)
        check_choices(self)
        if isinstance(self.base, StatisticAllocator) or self.base.per_head:
            raise ValueError("ada wraps allocators that share over layers by rule, such as uniform and pyramid")

    @property
    def exact(self) -> bool:
        return self.rounding != "official" and self.base.exact

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return self.base.split(total, layers, length, floor)

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        budget = on_device(tuple(budgets), ranking.seen.device)
        if self.rounding == "kvpress":
            return self._kvpress(ranking, budget)
        fixed = ranking.protected.sum(-1)
        candidates = ranking.occupied & ~ranking.protected
        base = (budget[:, None] - fixed).clamp(min=0)
        won = top_over_heads(ranking, candidates, base.sum(-1))
        if self.rounding == "official":
            floor = (self.alpha * base).floor()
            return fixed + (won * (1 - self.alpha) + floor).round().long()
        targets = won * (1 - self.alpha) + self.alpha * base
        return fixed + largest_remainders(targets, base.sum(-1), candidates.sum(-1))

    def _kvpress(self, ranking: Ranking, budget: Tensor) -> Tensor:
        scores = ranking.scores.masked_fill(ranking.protected, torch.inf)
        ranked = Ranking(scores, ranking.tie_break, ranking.positions, ranking.protected, ranking.seen)
        forced = (self.alpha * budget).floor().long()
        safe = ranked.select(forced[:, None].expand(-1, scores.shape[1]))
        rest = (budget - forced) * scores.shape[1]
        return forced[:, None] + top_over_heads(ranked, ranked.occupied & ~safe, rest)

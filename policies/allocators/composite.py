"""KVCompose's composite tokens: layers compete for slots, and the KV heads of a layer get equal numbers.

Shapes: B batch, L layers, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.allocators.allocator import JointAllocator
from kvbench.policies.checks import choice
from kvbench.policies.ranking import Ranking


@dataclass(frozen=True)
class Composite(JointAllocator):
    """The best token of every head, the second best, ...: each such rank is one composite token of its layer.

        c_(l,i) = 1 / H sum_g s_(l,g,(i)), s_(l,g,(i)) = "the" i"-th largest score of the head"

    The L * b best composite tokens of all layers stay, so that a layer keeps as many tokens in each head, and at least
    one. Ties go to the lower rank, then to the lower layer.

    official: as in the code, the scores of layer 0 are raised to the largest of all layers at each rank, so that no
    layer keeps more tokens.
    Source: arXiv 2509.05165, and kvpress's KVComposePress.
    """

    official: bool = False

    def __post_init__(self) -> None:
        choice("official", self.official, True, False)

    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        device, most = rankings[0].scores.device, max(one.scores.shape[-1] for one in rankings)
        curves = torch.stack([_composite(one, most).to(device) for one in rankings], dim=1)  # [B,L,T]
        if self.official:
            curves[:, 0] = curves.amax(1)
        curves[..., 0] = torch.where(curves[..., 0] > -torch.inf, torch.inf, -torch.inf)  # at least one token
        layers = len(rankings)
        order = curves.mT.flatten(1).argsort(dim=-1, descending=True, stable=True)  # by rank, then by layer
        total = order.new_tensor(budgets).sum(0)[:, None]
        stored = (curves > -torch.inf).flatten(1).sum(-1, keepdim=True)
        chosen = torch.arange(order.shape[-1], device=device) < torch.minimum(total, stored)
        counts = torch.zeros_like(curves[..., 0], dtype=torch.long).scatter_add_(-1, order % layers, chosen.long())
        return [counts[:, i, None].expand(-1, one.scores.shape[1]) for i, one in enumerate(rankings)]


def _composite(ranking: Ranking, slots: int) -> Tensor:
    """The scores of a layer's composite tokens, [B,slots]: -inf without a token, protected tokens first."""
    scores = ranking.scores.masked_fill(ranking.protected, torch.inf).masked_fill(~ranking.occupied, -torch.inf)
    mean = scores.sort(dim=-1, descending=True).values.mean(1)
    return torch.nn.functional.pad(mean, (0, slots - mean.shape[-1]), value=-torch.inf)

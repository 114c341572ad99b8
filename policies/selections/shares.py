"""Each chunk of a text keeps the same share of its tokens.

Shapes: B batch, H KV heads, T slots.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kernels.selection import LAST
from kvbench.policies.checks import whole_number
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.selection import Selection


@dataclass(frozen=True)
class Shares(Selection):
    """Tokens compete only within their chunk, so that every chunk keeps the same share of its tokens.

        s'_j = - r_j / n, r_j = "rank of token" j "among the" n "tokens of its chunk", 1 "is the best"

    Protected tokens rank highest in their chunk. FINCH's code for kvpress (`chunk_length`) uses this rule for prompts
    that are prefilled in one pass.

    length: tokens per chunk, by position in the text; the last chunk may be shorter.
    Source: FinchPress of kvpress, after Corallo and Papotti 2024, arXiv 2408.00167.
    """

    length: int = 512

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1)

    def rank(self, ranking: Ranking) -> Ranking:
        rank, size = ranks_within(ranking, ranking.positions.long() // self.length)
        return replace(ranking, scores=-rank / size, tie_break=ranking.scores)


def ranks_within(ranking: Ranking, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Every token's rank among the tokens of its part, 1 is the best, and their number, [B,H,T] float64; parts: int."""
    told = ranking.scores.double().masked_fill(ranking.protected, torch.inf)
    parts = parts.masked_fill(~ranking.occupied, LAST)
    best = told.argsort(dim=-1, descending=True, stable=True)
    order = best.gather(-1, parts.gather(-1, best).argsort(dim=-1, stable=True))  # by part, then by score
    of = parts.gather(-1, order).contiguous()
    begin, end = torch.searchsorted(of, of), torch.searchsorted(of, of, right=True)
    rank = torch.arange(1, of.shape[-1] + 1, device=of.device) - begin
    found = (torch.empty_like(told).scatter_(-1, order, x.double()) for x in (rank, end - begin))
    return next(found), next(found)

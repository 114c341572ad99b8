"""Token sets that a serving engine can evict: whole pages, and one set for all heads of a layer or of the model.

Shapes: B batch, H KV heads, T slots, P tokens per page, M pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import counted
from kvbench.kernels.selection import LAST
from kvbench.policies.checks import check_choices, whole_number
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.selection import Selection


@dataclass(frozen=True)
class Pages(Selection):
    """Keep the token set that the memory of an engine allows; works with any scorer.

        c_m = mean_(j in "page" m) s_j, s_j = 1 / H sum_h s_(h,j)

    Engines store tokens in pages (vLLM: blocks) of `length` tokens. A page holds all KV heads of a layer, and one table
    of pages serves all layers. Without moving tokens, only whole pages can be freed. Protected pages, which hold a
    protected token, come first, then pages by score; ties go to the older page. With `unit=page` the budget is rounded
    to whole pages; the newest page may be short, so that fewer tokens are kept than its slots.

    length: tokens per page. unit: `page` keeps whole pages; `token` keeps single tokens. heads: each KV head keeps its
    `own` set, or one set by the mean score for all heads of a `layer` or of the `model`; for the model, the scores of
    each layer are first standardised over its tokens that may be evicted. reduce: the mean, largest or summed score of
    a page's tokens; sums disfavour the short page. rounding: pages in a budget, `down` or `up`, which exceeds the
    budget.
    Source: ours, after the engines' documentation; PagedEviction (Chitty-Venkata et al. 2025, arXiv 2509.04377).
    """

    length: int = 16
    unit: Literal["page", "token"] = "page"
    heads: Literal["layer", "own", "model"] = "layer"
    reduce: Literal["mean", "max", "sum"] = "mean"
    rounding: Literal["down", "up"] = "down"

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1)
        check_choices(self)

    def rank(self, ranking: Ranking) -> Ranking:
        if self.heads != "own":
            ranking = _shared(ranking, ranking.scores.double().mean(1, keepdim=True))
        return ranking if self.heads == "model" else self.by_page(ranking)

    def rank_of_all(self, rankings: Sequence[Ranking]) -> list[Ranking]:
        """The rankings of all layers, as `rank` returned them, with one set of tokens for the whole model."""
        standard = [_standardised(one) for one in rankings]
        mean = torch.stack([x.to(standard[0].device) for x in standard]).mean(0)
        return [self.by_page(_shared(one, mean.to(one.scores.device))) for one in rankings]

    def by_page(self, ranking: Ranking) -> Ranking:
        """Every token with the score of its page, and whole pages protected; unchanged with `unit=token`."""
        if self.unit == "token":
            return ranking
        page = self._page(ranking)
        kept = self._reduced(ranking.protected.double(), page, "amax").gather(-1, page) > 0
        found = self._of_pages(ranking, page).gather(-1, page).masked_fill(~ranking.occupied, 0.0)
        stays = kept & ranking.occupied
        return replace(ranking, scores=found.to(ranking.scores.dtype), tie_break=None, protected=stays, spared=stays)

    def counts(self, ranking: Ranking, pages: Tensor) -> Tensor:
        """Tokens of the best pages [B] (numbers of pages) in each KV head, [B,H]. `ranking`: by page.

        Raises ValueError if protected pages exceed the number.
        """
        page, occupied = self._page(ranking), ranking.occupied
        sizes = self._reduced(occupied.double(), page, "sum").long()
        fixed = self._reduced((ranking.protected & occupied).double(), page, "amax")
        if bool((fixed.sum(-1) > pages[:, None]).any()):
            most, allowed = int(fixed.sum(-1).max()), int(pages.min())
            raise ValueError(
                f"{counted(most, 'page')} of {counted(self.length, 'token')} hold tokens that are always "
                f"kept, but the budget has {allowed} "
                "pages: use a larger budget or protect fewer tokens"
            )
        scores = self._reduced(ranking.scores.double().masked_fill(~occupied, -torch.inf), page, "amax")
        scores = scores.masked_fill(fixed > 0, torch.inf).masked_fill(sizes == 0, -torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        among = torch.arange(order.shape[-1], device=order.device) < pages[:, None, None]
        return (sizes.gather(-1, order) * among).sum(-1)

    def _of_pages(self, ranking: Ranking, page: Tensor) -> Tensor:
        """The score of each page, [B,H,M] float64: of its tokens alone, as empty slots may fill the page."""
        scores, occupied = ranking.scores.double(), ranking.occupied
        if self.reduce == "max":
            return self._reduced(scores.masked_fill(~occupied, -torch.inf), page, "amax")
        sums = self._reduced(scores.masked_fill(~occupied, 0.0), page, "sum")
        return sums if self.reduce == "sum" else sums / self._reduced(occupied.double(), page, "sum").clamp(min=1)

    def _page(self, ranking: Ranking) -> Tensor:
        """The page of every slot, [B,H,T]: pages are filled in order of position. Empty slots have the last pages."""
        slots = torch.arange(ranking.positions.shape[-1], device=ranking.positions.device)
        if ranking.ascending:
            return (slots // self.length).expand(ranking.positions.shape)
        order = ranking.positions.long().masked_fill(~ranking.occupied, LAST).argsort(dim=-1, stable=True)
        places = torch.empty_like(order).scatter_(-1, order, slots.expand_as(order).contiguous())
        return places // self.length

    def _reduced(self, x: Tensor, page: Tensor, how: str) -> Tensor:
        """x [B,H,T] reduced over the tokens of each page: [B,H,M]."""
        out = x.new_zeros(*x.shape[:2], -(-x.shape[-1] // self.length))
        return out.scatter_reduce_(-1, page, x, how, include_self=False)


def _standardised(ranking: Ranking) -> Tensor:
    """Scores that all heads share, standardised over the tokens that may be evicted: [B,1,T] float64."""
    scores = ranking.scores[:, :1].double()
    among = (ranking.occupied & ~ranking.protected)[:, :1]
    count = among.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * among).sum(-1, keepdim=True) / count
    spread = (((scores - mean) * among).square().sum(-1, keepdim=True) / count).sqrt()
    return (scores - mean) / spread.clamp(min=1e-6)


def _shared(ranking: Ranking, scores: Tensor) -> Ranking:
    """The ranking of one token set for all heads by scores [B,1,T]."""
    return replace(ranking, scores=scores.to(ranking.scores.dtype).expand_as(ranking.scores), tie_break=None)

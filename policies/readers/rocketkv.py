"""RocketKV: evict prompt tokens, then read the kept tokens with the largest approximate attention.

Shapes: B batch, H_kv KV heads, G query heads each, P pages, p tokens of a page, D head dim.
"""

from dataclasses import dataclass
from math import ceil, floor, log2, sqrt

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading, ReadPlan, channel_bounds


@dataclass(frozen=True)
class RocketKV(Reader):
    """Keep a part of the prompt, and read the half of the budget with the largest approximate attention to a query.

        S = "prompt" + "max_new", c = max(1, S / "budget"), alpha = min(0.2 + 0.06 log_2 c, 0.8)
        C = max(floor(S / c^alpha), min(2 * "max_new", S)), c_2 = max(1, C / "budget")
        p = ceil(sqrt(c_2)), r = floor(D * p / c_2)
        z_(h,P) = sum_(d in R) q_(h,d) * b_(P,d) "if" sum_h q_(h,d) > 0 "else" q_(h,d) * a_(P,d)
        s_j = mean_(h in "group") softmax_j(z_(h,P(j)) / sqrt(D * sum_(d in R) |q_(h,d)| / sum_d |q_(h,d)|))

    The budget limits the bytes that a decoded query reads, in tokens. The policy's scorer keeps C - max_new tokens
    of the prompt (all if C >= S), and generated tokens are never evicted. Kept tokens are summarised in pages of p
    tokens (1 if p > c_2); a and b are the minimum and the maximum of each channel over the keys of page P. A query
    reads, of every page, the r channels R with the largest mean |q_(h,d)| of the group, and only a or b of each. Then
    it attends to the floor(budget / 2) tokens with the largest s; of a page that is cut, to the older ones.

    max_new: the number of generated tokens that the budget is planned for. official: r is rounded, as in the authors'
    gpt-fast code.
    Source: Behnam et al. 2025, arXiv 2502.14051, and its code (NVlabs/RocketKV).
    """

    evicts = True

    max_new: int = 128
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("max_new", self.max_new, 1)

    def plan(self, budget: int, prompt: int) -> ReadPlan:
        capacity, ratio = self._capacity(budget, prompt)
        page = ceil(sqrt(ratio))
        return ReadPlan(page if page <= ratio else 1, budget // 2, cuts=True, kept=capacity - self.max_new)

    def channels(self, budget: int, prompt: int, dim: int) -> int:
        """r: how many of a head's `dim` channels are read of every page."""
        page, (_, ratio) = self.plan(budget, prompt).page, self._capacity(budget, prompt)
        exact = dim * page / ratio
        return max(1, min(dim, round(exact) if self.official else floor(exact)))

    def _capacity(self, budget: int, prompt: int) -> tuple[int, float]:
        """C and c_2."""
        total = prompt + self.max_new
        ratio = max(1.0, total / budget)
        capacity = max(floor(total / ratio ** min(0.2 + 0.06 * log2(ratio), 0.8)), min(2 * self.max_new, total))
        return capacity, max(1.0, capacity / budget)

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        return channel_bounds(keys, present)

    def score(self, reading: Reading) -> Tensor:
        smallest, largest = (widen(reading.summaries[name]) for name in ("smallest", "largest"))  # [B,H_kv,P,D]
        queries = widen(reading.queries)[:, :, 0].unflatten(1, (-1, reading.group))  # [B,H_kv,G,D]
        sizes = queries.abs()
        order = sizes.mean(2).argsort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        count = on_device(tuple(self._channels_of(reading)), ranks.device)[:, None, None]
        read = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, ranks < count)[:, :, None]  # [B,H_kv,1,D]
        partial = queries * read
        up = queries.sum(2, keepdim=True) > 0
        logits = (partial * up) @ largest.mT + (partial * ~up) @ smallest.mT  # [B,H_kv,G,P]
        share = (sizes * read).sum(-1) / sizes.sum(-1).clamp(min=torch.finfo(sizes.dtype).tiny)
        logits = logits * (reading.scaling / share.clamp(min=torch.finfo(sizes.dtype).tiny).sqrt())[..., None]
        return reading.weights(logits, self._tokens_of_pages(reading, logits.shape[-1]))

    def nbytes_scanned(self, reading: Reading) -> int:
        """Of every page with a token, the channels that are read, of either the minimum or the maximum."""
        largest = reading.summaries["largest"]
        pages: list[int] = (self._tokens_of_pages(reading, largest.shape[2]) > 0).sum((1, 2)).tolist()
        channels = self._channels_of(reading)
        return sum(n * r for n, r in zip(pages, channels, strict=True)) * largest.element_size()

    def _channels_of(self, reading: Reading) -> list[int]:
        dim = reading.keys.shape[-1]
        return [self.channels(b, prompt, dim) for b, prompt in zip(reading.budgets, reading.prompts, strict=True)]

    def _tokens_of_pages(self, reading: Reading, pages: int) -> Tensor:
        """Visible tokens of each page, [B,H_kv,P]."""
        plans = [self.plan(b, prompt) for b, prompt in zip(reading.budgets, reading.prompts, strict=True)]
        seen = reading.visible.long()
        size = on_device(tuple(plan.page for plan in plans), seen.device)[:, None, None]
        page_of = (torch.arange(seen.shape[-1], device=seen.device) // size).expand_as(seen)
        return seen.new_zeros(*seen.shape[:2], pages).scatter_add_(-1, page_of, seen)

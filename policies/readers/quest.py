"""Quest: pages whose keys may give the query its largest product.

Shapes: B batch, H_kv KV heads, G query heads each, P pages, p tokens of a page, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import whole_number
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading


@dataclass(frozen=True)
class Quest(Reader):
    """Read the pages with the largest upper bound of a product of the query with one of their keys.

        s_P = mean_(h in "group") sum_d max(q_(h,d) * a_(P,d), q_(h,d) * b_(P,d))

    a and b are the smallest and the largest number of each channel among the keys of page P. Grouped query heads share
    the pages of their KV head, by the mean of their bounds; the paper has one query head per KV head.

    page: tokens of a page. first_layers: so many layers read everything, beyond the budget.
    Source: Tang et al. 2024, arXiv 2406.10774, section 3.3 and algorithm 1: pages of 16, the first two layers whole.
    """

    page: int = 16
    first_layers: int = 2

    def __post_init__(self) -> None:
        whole_number("page", self.page, 1)
        whole_number("first_layers", self.first_layers, 0)

    def reads_all(self, layer: int) -> bool:
        return layer < self.first_layers

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        absent = ~present[..., None]
        smallest = keys.masked_fill(absent, torch.inf).amin(-2)
        largest = keys.masked_fill(absent, -torch.inf).amax(-2)
        there = present.any(-1, keepdim=True)
        return {"smallest": smallest.masked_fill(~there, 0), "largest": largest.masked_fill(~there, 0)}

    def score(self, reading: Reading) -> Tensor:
        smallest, largest = (widen(reading.summaries[name]) for name in ("smallest", "largest"))  # [B,H_kv,P,D]
        queries = widen(reading.queries).unflatten(1, (-1, reading.group))  # [B,H_kv,G,1,D]
        # max(q a, q b) is q b where q is positive, q a where it is negative.
        bounds = queries.clamp(min=0) @ largest.mT[:, :, None] + queries.clamp(max=0) @ smallest.mT[:, :, None]
        means: Tensor = bounds.mean(2)[:, :, 0]
        return means

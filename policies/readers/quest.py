"""Quest: read the pages with the largest upper bound on query-key products.

Shapes: B batch, H_kv KV heads, G query heads each, P pages, p tokens of a page, D head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import whole_number
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading, channel_bounds


@dataclass(frozen=True)
class Quest(Reader):
    """Read the pages with the largest upper bound on the product of the query and one of their keys.

        s_P = mean_(h in "group") sum_d max(q_(h,d) * a_(P,d), q_(h,d) * b_(P,d))

    a and b are the minimum and the maximum of each channel over the keys of page P. The query heads of a group share
    the pages of their KV head, chosen by the mean of their bounds; the paper has one query head per KV head.

    page: tokens per page. first_layers: number of first layers that read all tokens regardless of the budget.
    Source: Tang et al. 2024, arXiv 2406.10774, section 3.3 and algorithm 1: pages of 16 tokens, full attention in the
    first two layers.
    """

    page: int = 16
    first_layers: int = 2

    def __post_init__(self) -> None:
        whole_number("page", self.page, 1)
        whole_number("first_layers", self.first_layers, 0)

    def reads_all(self, layer: int) -> bool:
        return layer < self.first_layers

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        return channel_bounds(keys, present)

    def score(self, reading: Reading) -> Tensor:
        smallest, largest = (widen(reading.summaries[name]) for name in ("smallest", "largest"))  # [B,H_kv,P,D]
        queries = widen(reading.queries).unflatten(1, (-1, reading.group))  # [B,H_kv,G,1,D]
        # max(q a, q b) is q b if q is positive and q a if it is negative.
        bounds = queries.clamp(min=0) @ largest.mT[:, :, None] + queries.clamp(max=0) @ smallest.mT[:, :, None]
        means: Tensor = bounds.mean(2)[:, :, 0]
        return means

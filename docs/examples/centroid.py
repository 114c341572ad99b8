"""Read the pages with the largest product of mean key and query."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading


@dataclass(frozen=True)
class Centroid(Reader):
    """Read the pages with the largest product of mean key and query, averaged over the group.

        s_P = 1 / G sum_(h in "group") q_h * mean_(j in P) k_j

    page: tokens per page. whole: number of first layers that read all tokens.
    """

    page: int = 8
    whole: int = 1

    def __post_init__(self) -> None:
        whole_number("page", self.page, 1)
        whole_number("whole", self.whole, 0)

    def reads_all(self, layer: int) -> bool:
        return layer < self.whole

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        there = present[..., None]
        return {"mean": (keys * there).sum(-2) / there.sum(-2).clamp(min=1)}  # [B,H_kv,P,p,D] -> [B,H_kv,P,D]

    def score(self, reading: Reading) -> Tensor:
        queries = reading.queries[:, :, 0].unflatten(1, (-1, reading.group)).mean(2)  # [B,H_q,1,D] -> [B,H_kv,D]
        return (reading.summaries["mean"] @ queries[..., None]).squeeze(-1)  # [B,H_kv,P]

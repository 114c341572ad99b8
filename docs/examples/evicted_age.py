"""A watcher of evictions: how old tokens are when they are evicted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.watcher import Watcher


@dataclass
class EvictedAge(Watcher):
    """Mean number of tokens that came after a token when it was evicted, over all layers and KV heads.

    since: only evictions after this number of tokens count.
    """

    name = "evicted age"

    since: int = 0

    def __post_init__(self) -> None:
        self.tokens: Tensor | int = 0
        self.ages: Tensor | int = 0

    def evicted(self, layer: int, gone: Tensor, seen: int) -> None:
        if seen > self.since:
            ages = torch.arange(seen - 1, -1, -1, device=gone.device)  # of the tokens 0, 1, ..., seen - 1
            self.tokens = self.tokens + gone.sum()
            self.ages = self.ages + (gone * ages).sum()

    def value(self) -> float | None:
        return float(self.ages / self.tokens) if int(self.tokens) else None

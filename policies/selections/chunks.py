"""ChunkKV: tokens are kept or evicted in chunks of neighbours.

Shapes: B batch, H KV heads, T slots, N slots of a row.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.selection import LAST
from kvbench.policies.checks import check_choices, whole_number
from kvbench.policies.positions import group_sums
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.selection import Selection


@dataclass(frozen=True)
class Chunks(Selection):
    """Keep the chunks of `length` neighbouring tokens with the highest mean scores; works with any scorer.

        c_m = mean_(h, j in "chunk" m) s_(h,j), m = floor(j / length)

    A token's chunk is determined by its position in the text, even if some of its neighbours were evicted before. A
    protected token, which is always kept, counts with its layer's largest score. If the budget ends inside a chunk, the
    tokens with the highest individual scores are kept, so budgets are exact. kvpress keeps only whole chunks; it keeps
    a different number of tokens if lengths do not divide and may lose part of a window.

    length: tokens per chunk. heads: all KV heads of a `layer` keep the same chunks, or each head keeps its `own`.
    reduce: the mean of a chunk's scores, as in the code, or their sum, as in the paper; a last chunk may be shorter.
    Source: Liu et al. 2025, arXiv 2502.00299, algorithm 1, with chunks of 10 tokens; its code is ChunkKVPress of
    kvpress, where the heads of a layer share one set.
    """

    length: int = 10
    heads: Literal["layer", "own"] = "layer"
    reduce: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1)
        check_choices(self)

    def rank(self, ranking: Ranking) -> Ranking:
        scores, occupied = ranking.scores, ranking.occupied
        free = occupied & ~ranking.protected
        largest = scores.masked_fill(~free, -torch.inf).amax((1, 2), keepdim=True)
        told = torch.where(ranking.protected, largest, scores).masked_fill(~occupied, 0.0)
        found = self._of_chunks(told, occupied, ranking.positions)
        return replace(ranking, scores=found.to(scores.dtype), tie_break=scores)

    def _of_chunks(self, scores: Tensor, occupied: Tensor, positions: Tensor) -> Tensor:
        """The score of each token's chunk, [B,H,T] float64."""
        rows = scores.shape[:1] if self.heads == "layer" else scores.shape[:2]
        flat, there, place = (x.reshape(*rows, -1) for x in (scores, occupied, positions.long()))  # [...,N]
        chunks = (place // self.length).masked_fill(~there, LAST)
        sums, counts = group_sums(chunks, flat, there)
        return (sums / counts.clamp(min=1) if self.reduce == "mean" else sums).view_as(scores)

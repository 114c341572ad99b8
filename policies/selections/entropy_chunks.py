"""EG-ChunkKV: chunks of neighbours, of which those with a few outstanding tokens keep only these.

Shapes: B batch, H KV heads, T slots, N = H T slots of a layer.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.selection import LAST
from kvbench.policies.checks import whole_number
from kvbench.policies.positions import group_sums, groups
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.selection import Selection

EPSILON = 1e-8


@dataclass(frozen=True)
class EntropyChunks(Selection):
    """Keep the chunks of `length` neighbouring tokens with the highest mean scores, and of some only the best tokens.

        s_j = sum_h s_(h,j), S_m = mean_(j in "chunk" m) s_j
        E_m = - 1 / ln n sum_(j in "chunk" m) p_j ln(p_j + 1e-8), p_j = s_j / (sum_(i in "chunk" m) s_i + 1e-8)

    Chunks come in order of S. A chunk of n tokens with S of at least the median and E below the median counts with its
    `best` tokens only; its others follow after all chunks, by score. If a chunk has a negative score, its lowest is
    subtracted for p. E of a single token is 0, and medians of an even number are the lower of two. All KV heads of a
    layer keep the same tokens. A protected token, which is always kept, counts with its layer's largest score.

    length: tokens per chunk, by position in the text. best: tokens that a chunk of low entropy keeps.
    Source: EntropyGatedChunkKVPress of kvpress (pull request 263), after ChunkKV (arXiv 2502.00299).
    """

    length: int = 10
    best: int = 4

    def __post_init__(self) -> None:
        whole_number("length", self.length, 2)
        whole_number("best", self.best, 1)
        if self.best >= self.length:
            raise ConfigError("best", self.best, f"fewer tokens than a chunk has (length={self.length})")

    def rank(self, ranking: Ranking) -> Ranking:
        occupied, shape = ranking.occupied, ranking.scores.shape
        free = occupied & ~ranking.protected
        largest = ranking.scores.masked_fill(~free, -torch.inf).amax((1, 2), keepdim=True)
        told = torch.where(ranking.protected, largest, ranking.scores).masked_fill(~occupied, 0.0).flatten(1)
        places = ranking.positions.long().masked_fill(~occupied, LAST).flatten(1)
        there = occupied.flatten(1)
        tokens, holders = group_sums(places, told, there)  # of every slot: its token's score, and heads that hold it
        chunk = groups((places // self.length).masked_fill(~there, LAST))
        mean, entropy = self.statistics(chunk, tokens, there / holders.clamp(min=1))
        exists = torch.zeros_like(mean).scatter_add_(-1, chunk, there.double()) > 0
        cut = (mean >= _lower_median(mean, exists)) & (entropy < _lower_median(entropy, exists))
        rest = cut.gather(-1, chunk) & (self._rank_in_chunk(chunk, tokens, places) >= self.best)
        visited = mean.masked_fill(~exists, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        behind = torch.arange(chunk.shape[-1], 0, -1, device=chunk.device).expand_as(chunk)
        scores = torch.empty_like(chunk).scatter_(-1, visited, behind).gather(-1, chunk).masked_fill(rest, 0)
        return replace(
            ranking, scores=scores.view(shape).to(ranking.scores), tie_break=tokens.view(shape).to(ranking.scores)
        )

    def statistics(self, chunk: Tensor, tokens: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """S and E of each chunk, [B,N] float64, from the chunk and the token's score of each slot, [B,N].

        share: of the token's entry in sums over slots, 1 / the number of heads that hold it, 0 in empty slots.
        """

        def summed(x: Tensor) -> Tensor:
            return torch.zeros_like(tokens).scatter_add_(-1, chunk, x)

        sizes = summed(share.double())
        mean = summed(tokens * share) / sizes.clamp(min=1)
        lowest = torch.zeros_like(tokens).scatter_reduce_(-1, chunk, tokens, "amin")  # at most 0
        raised = tokens - lowest.gather(-1, chunk)
        parts = raised / (summed(raised * share).gather(-1, chunk) + EPSILON)
        entropy = -summed(parts * (parts + EPSILON).log() * share) / sizes.clamp(min=2).log()
        return mean, entropy.clamp(0, 1).masked_fill(sizes < 1.5, 0.0)

    @staticmethod
    def _rank_in_chunk(chunk: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """How many tokens of its chunk are better than a slot's token, [B,N]; of equal ones, the older is better."""
        order = places.argsort(dim=-1, stable=True)
        order = order.gather(-1, tokens.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        order = order.gather(-1, chunk.gather(-1, order).argsort(dim=-1, stable=True))
        ordered, of = places.gather(-1, order), chunk.gather(-1, order)
        new = torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0)).cumsum(-1)
        first = torch.full_like(new, LAST).scatter_reduce_(-1, of, new, "amin").gather(-1, of)
        return torch.empty_like(new).scatter_(-1, order, new - first)


def _lower_median(x: Tensor, exists: Tensor) -> Tensor:
    """The lower median of the numbers [B,N] that exist, [B,1]."""
    middle = (exists.sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    return x.masked_fill(~exists, math.inf).sort(dim=-1).values.gather(-1, middle)

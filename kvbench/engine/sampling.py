"""Sampled tokens: what is left of a distribution, and the numbers by which a sequence draws from it.

A sequence draws one number for each of its tokens, from a stream of its own: alone, in a batch, and computed again
after a kill, it draws the same ones.

Shapes: S sequences, V vocabulary.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from kvbench.run.sampling import Sampling


class TokenSampler:
    """The numbers, from 0 to below 1, by which one answer draws its tokens: by seed, example and sample alone."""

    def __init__(self, sampling: Sampling, seed: int, example: int, sample: int) -> None:
        self.sampling = sampling
        self._random = Random(f"{seed} {example} {sample}")

    def next(self) -> float:
        """The number for the next token."""
        return self._random.random()


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [S,V] over the temperature in float32, -inf where a token may not be drawn."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        rising, order = scores.sort(stable=True)  # stable: equal logits alone stand as they stand in a batch
        out = rising.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out[:, -1] = False
        scores = scores.masked_fill(out.scatter(1, order, out), -torch.inf)
    return scores


def drawn(logits: Tensor, draws: Sequence[TokenSampler]) -> Tensor:
    """The next token of each sequence, logits [S,V] -> [S]: where the sum of probabilities passes the number drawn.

    All draw by the same `Sampling`.
    """
    sums = filtered(logits, draws[0].sampling).softmax(-1).cumsum(-1, dtype=torch.float64)
    numbers = torch.tensor([[one.next()] for one in draws], dtype=torch.float64, device=sums.device)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)

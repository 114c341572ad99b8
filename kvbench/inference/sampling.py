"""Sampled tokens: what is left of a distribution, and the numbers by which a sequence draws from it.

A sequence draws one number for each of its tokens, from a stream of its own: alone, in a batch, and computed again
after a kill, it draws the same ones.

Shapes: S sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvbench.errors import ConfigError, number, whole_number


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), of the `top_k` likeliest, of the `top_p` nucleus.

    temperature: 0 is greedy. top_p: the likeliest tokens that hold so much of the probability together; 1: all.
    top_k: so many of the likeliest; 0: all. Order and ties as transformers' logits warpers have them.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        number("top_p", self.top_p, 0, 1)
        whole_number("top_k", self.top_k, 0)
        if self.top_p == 0:
            raise ConfigError("top_p", self.top_p, "a number above 0 and at most 1")
        if self.greedy and (self.top_p, self.top_k) != (1, 0):
            name = "top_k" if self.top_k else "top_p"
            raise ConfigError(name, getattr(self, name), why="has no effect: decoding is greedy, set temperature")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


def check_samples(sampling: Sampling, samples: int) -> None:
    """ConfigError where a prompt cannot have so many answers."""
    whole_number("samples", samples, 1)
    if sampling.greedy and samples > 1:
        raise ConfigError("samples", samples, why="has no effect: decoding is greedy, set temperature")


class Draws:
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


def drawn(logits: Tensor, draws: Sequence[Draws]) -> Tensor:
    """The next token of each sequence, logits [S,V] -> [S]: where the sum of probabilities passes the number drawn.

    All draw by the same `Sampling`.
    """
    sums = filtered(logits, draws[0].sampling).softmax(-1).cumsum(-1, dtype=torch.float64)
    numbers = torch.tensor([[one.next()] for one in draws], dtype=torch.float64, device=sums.device)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)

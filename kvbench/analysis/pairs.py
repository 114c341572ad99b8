"""Two results on the same examples: their difference with its interval, and by how much examples differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import pvariance

from kvbench.analysis.averages import of_prompts
from kvbench.analysis.statistics import Difference, paired_difference
from kvbench.records.sample import Likelihood, Sample


@dataclass(frozen=True)
class Paired:
    """How much higher `second` scores than `first` (of given texts: how much higher its NLL is) on shared prompts.

    spread: standard deviation of the difference per example. read: the texts of both, where texts were given.
    """

    difference: Difference
    spread: float
    read: tuple[tuple[Likelihood, Likelihood], ...] = ()


@dataclass(frozen=True)
class NLLGap:
    """What a policy costs on the texts it shares with full: NLL (nats per token) and perplexity, less those of full.

    Both means are over tokens. interval: of the NLL, over texts; None for a single text.
    """

    nll: float
    interval: Difference | None
    perplexity: float


def shared(first: Sequence[Sample], second: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The examples of the same prompts, in the order of `second`; a prompt asked k times pairs k times at most."""
    known: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(of_prompts(first)):
        known[sample.prompt_hash].append(sample)
    return [(known[b.prompt_hash].pop(), b) for b in of_prompts(second) if known[b.prompt_hash]]


def paired(first: Sequence[Sample], second: Sequence[Sample]) -> Paired | None:
    """Compare the examples of the same prompts for which both have a value; None without any."""
    pairs = shared(first, second)
    read = tuple((a.likelihood, b.likelihood) for a, b in pairs if a.likelihood and b.likelihood)
    values = [(a.nll, b.nll) for a, b in read] or [
        (a.score, b.score) for a, b in pairs if a.score is not None and b.score is not None
    ]
    if not values:
        return None
    weights = [b.tokens for _, b in read] or None
    difference = paired_difference([a for a, _ in values], [b for _, b in values], weights=weights)
    return Paired(difference, sqrt(pvariance([b - a for a, b in values])), read)

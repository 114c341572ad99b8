"""Paired comparison of two results on the same examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import pvariance

from kvbench.results.metrics import of_prompts
from kvbench.results.samples import Likelihood, Sample
from kvbench.results.statistics import Difference, paired_difference


@dataclass(frozen=True)
class Paired:
    """Difference between `second` and `first` on shared prompts: in score, or in NLL for given texts.

    spread: standard deviation of the difference per example. read: the likelihoods of both, for given texts.
    """

    difference: Difference
    spread: float
    read: tuple[tuple[Likelihood, Likelihood], ...] = ()


@dataclass(frozen=True)
class NLLGap:
    """NLL (nats per token) and perplexity of a policy minus those of full, on shared texts.

    Both means are over tokens. interval: of the NLL, over texts; None for a single text.
    """

    nll: float
    interval: Difference | None
    perplexity: float


def shared(first: Sequence[Sample], second: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs of examples with the same prompt, in the order of `second`; a repeated prompt pairs as often as in both."""
    known: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(of_prompts(first)):
        known[sample.prompt_hash].append(sample)
    return [(known[b.prompt_hash].pop(), b) for b in of_prompts(second) if known[b.prompt_hash]]


def paired(first: Sequence[Sample], second: Sequence[Sample]) -> Paired | None:
    """Compare the examples with the same prompts and a value in both; None if there are none."""
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

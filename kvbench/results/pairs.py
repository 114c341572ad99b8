"""Paired comparison of two results on the same examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.results.statistics import Difference, paired_difference
from kvbench.results.summary import Outcome


@dataclass(frozen=True)
class Paired:
    """Difference between `second` and `first` on shared prompts: in score, in KL from full, or in NLL for given texts.

    read: the outcomes of both, for given texts.
    """

    difference: Difference
    read: tuple[tuple[Outcome, Outcome], ...] = ()


@dataclass(frozen=True)
class NLLGap:
    """NLL (nats per token) and perplexity of a policy minus those of full, on shared texts.

    Both means are over tokens. interval: of the NLL, over texts; None for a single text.
    """

    nll: float
    interval: Difference | None
    perplexity: float


def shared(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Pairs with the same prompt, in the order of `second`; a repeated prompt pairs as often as in both."""
    known: defaultdict[str, list[Outcome]] = defaultdict(list)
    for one in reversed(first):
        known[one.prompt_hash].append(one)
    return [(known[b.prompt_hash].pop(), b) for b in second if known[b.prompt_hash]]


def paired(first: Sequence[Outcome], second: Sequence[Outcome]) -> Paired | None:
    """Compare the outcomes of the same prompts with a value in both; None if there are none."""
    pairs = shared(first, second)
    read = tuple((a, b) for a, b in pairs if a.nll is not None and b.nll is not None)
    values = [(a.nll or 0.0, b.nll or 0.0) for a, b in read]
    values = values or [(a.kl, b.kl) for a, b in pairs if a.kl is not None and b.kl is not None]
    weights = [float(b.tokens or 0) for _, b in read] or [1.0] * len(values) or None
    values = values or [(a.score, b.score) for a, b in pairs if a.score is not None and b.score is not None]
    if not values:
        return None
    return Paired(paired_difference([a for a, _ in values], [b for _, b in values], weights=weights), read)

"""Answers that repeat themselves: the share of repeated 4-grams, and a loop that lasts until the end of the answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

NGRAM = 4
LONGEST_PERIOD = 64
COPIES = 3
SHORTEST = 24
"""A loop has a period of at most 64 tokens, at least 3 copies of it and at least 24 tokens."""


@dataclass(frozen=True)
class Repetition:
    """How an answer repeats itself.

    rep_4: 1 - distinct 4-grams / 4-grams (seq-rep-4 of arXiv 1908.04319); None below 4 tokens. period: tokens of the
    loop in which the answer ends; copies: how often it occurs; start: tokens before it. They are None if the answer
    does not end in a loop.
    """

    rep_4: float | None
    period: int | None = None
    copies: int | None = None
    start: int | None = None

    @property
    def looping(self) -> bool:
        """Whether the answer repeats itself until its end."""
        return self.period is not None


def repetition(tokens: Sequence[Hashable]) -> Repetition:
    """The repetition in the generated tokens of an answer, without EOS.

    The end of the answer has period p if every token equals the one p later. Of p = 1, 2, ..., the first whose
    periodic end has at least 3 p and 24 tokens is the period of the loop. A loop that is followed by other text does
    not count; rep_4 shows it.
    """
    n = len(tokens)
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(n - NGRAM + 1)]
    rep_4 = 1 - len(set(grams)) / len(grams) if grams else None
    for period in range(1, min(LONGEST_PERIOD, n // COPIES) + 1):
        start = n - period
        while start and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if n - start >= max(COPIES * period, SHORTEST):
            return Repetition(rep_4, period, (n - start) // period, start)
    return Repetition(rep_4)

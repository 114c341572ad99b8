"""When another example may start, so that a killed process loses a bounded amount of work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GROWTH = 2
"""A batch may grow by this factor before one of its steps is timed."""


@dataclass(frozen=True)
class Work:
    """An example that has started. seconds: since its start. steps: that it needs at most. left: steps to its end."""

    seconds: float
    tokens: int
    steps: int
    left: int


class Pace:
    """Predicts when the examples in flight are on disk.

    An example must be on disk `save_seconds` after it started, or after twice the time that it needs by itself, if that
    is longer, however soon its answer ends: the time of one with 8 tokens of 128 is mostly that of its prefill, so that
    few prefills may come after it. Times are predicted from the last prefill and from decoding steps. A prefill for
    more sequences, and a step of more of them, takes longer in proportion, until steps of different sizes show how much
    it really is.
    """

    def __init__(self, save_seconds: float) -> None:
        self._seconds = save_seconds
        self._prefilled = (1, 0.0)  # sequences of the last prefill, and its seconds for each token of its prompt
        self._fastest = self._last = self._widest = (0, 0.0)  # sequences and seconds of a step

    def prefilled(self, tokens: int, sequences: int, seconds: float) -> None:
        """A prompt was prefilled for this many sequences."""
        self._prefilled = sequences, seconds / max(1, tokens)

    def stepped(self, sequences: int, seconds: float) -> None:
        """A step decoded a token of this many sequences."""
        self._last = sequences, seconds
        if sequences >= self._widest[0]:
            self._widest = self._last
        if not self._fastest[0] or seconds < self._fastest[1]:
            self._fastest = self._last

    def may_start(self, started: Iterable[Work], new: Work, in_flight: int, more: int) -> bool:
        """Whether an example of `more` sequences may start beside the examples `started` of `in_flight` sequences."""
        if not self._seconds or in_flight + more > GROWTH * self._widest[0]:
            return False
        last, per_token = self._prefilled
        prefill, step = per_token * new.tokens * max(1.0, more / last), self._step(in_flight + more)
        return all(self._in_time(work, prefill, step) for work in (*started, new))

    def _in_time(self, work: Work, prefill: float, step: float) -> bool:
        """Whether an example is on disk in time after another prefill, whatever the number of steps that it takes.

        Its time is linear in the steps and its bound convex, so that three numbers of steps are enough: the ones taken,
        the most, and between them the number at which twice its own time becomes the bound.
        """
        taken, own, fast = work.steps - work.left, self._prefilled[1] * work.tokens, self._fastest[1]
        turn = (self._seconds / 2 - own) / fast if fast else 0.0
        return all(
            work.seconds + prefill + (steps - taken) * step <= max(self._seconds, 2 * (own + steps * fast))
            for steps in (taken, min(max(turn, taken), work.steps), work.steps)
        )

    def _step(self, sequences: int) -> float:
        """Predicted seconds of a step of this many sequences."""
        (few, fast), (last, seconds), (most, longest) = self._fastest, self._last, self._widest
        slope = max(0.0, (longest - fast) / (most - few)) if most > few else seconds / max(1, last)
        return max(fast, seconds + slope * (sequences - last))

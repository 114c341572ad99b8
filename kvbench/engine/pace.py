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
    is longer. Times are predicted from the last prefill and from decoding steps: a step takes longer in proportion to
    the sequences that are added to it.
    """

    def __init__(self, save_seconds: float) -> None:
        self._seconds = save_seconds
        self._per_token = 0.0  # seconds of the last prefill for each token of its prompt
        self._fastest = self._last = (0, 0.0)  # sequences and seconds of a step
        self._most = 0  # sequences of the largest timed step

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prompt was prefilled."""
        self._per_token = seconds / max(1, tokens)

    def stepped(self, sequences: int, seconds: float) -> None:
        """A step decoded a token of this many sequences."""
        self._last = sequences, seconds
        self._most = max(self._most, sequences)
        if not self._fastest[0] or seconds < self._fastest[1]:
            self._fastest = self._last

    def may_start(self, started: Iterable[Work], new: Work, in_flight: int, more: int) -> bool:
        """Whether an example of `more` sequences may start beside the examples `started` of `in_flight` sequences."""
        if not self._seconds or in_flight + more > GROWTH * self._most:
            return False
        prefill, step = self._per_token * new.tokens, self._step(in_flight + more)
        return all(
            work.seconds + prefill + work.left * step <= max(self._seconds, 2 * self._alone(work))
            for work in (*started, new)
        )

    def _alone(self, work: Work) -> float:
        return self._per_token * work.tokens + work.steps * self._fastest[1]

    def _step(self, sequences: int) -> float:
        """Predicted seconds of a step of this many sequences."""
        (few, fast), (last, seconds) = self._fastest, self._last
        slope = max(0.0, (seconds - fast) / (last - few)) if last > few else 0.0
        return max(fast, seconds + slope * (sequences - last))

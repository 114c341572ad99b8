"""Who follows a run while it goes on: progress on a dashboard, say. The files in `out` stay the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbench.results.sample import Sample
from kvbench.run.run import Run


class RunCallback(Protocol):
    """Something that follows cells as they are computed. What it raises ends the run: it has to catch its own."""

    def started(self, cell: Run, done: Sequence[Sample], total: int) -> None:
        """Examples of a cell will be computed, `total` of them with those that lie on disk already, `done`."""
        ...

    def finished(self, cell: Run, sample: Sample) -> None:
        """One more example of a cell is on disk."""
        ...

    def ended(self, cell: Run, error: Exception | None) -> None:
        """A cell is complete, or went no further because of `error`."""
        ...


class NullCallback:
    """Ignores every event."""

    def started(self, cell: Run, done: Sequence[Sample], total: int) -> None:
        """Do nothing."""

    def finished(self, cell: Run, sample: Sample) -> None:
        """Do nothing."""

    def ended(self, cell: Run, error: Exception | None) -> None:
        """Do nothing."""

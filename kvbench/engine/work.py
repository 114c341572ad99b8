"""Which examples are computed for which runs, and that all runs are written in step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.engine.run_writer import RunWriter
from kvbench.models.prompts import Prompt


@dataclass(frozen=True)
class WorkItem:
    """One example and the runs that lack it."""

    index: int
    prompt: Prompt
    runs: tuple[RunWriter, ...]

    @property
    def first(self) -> int:
        """The example of the first turn of its conversation; itself where it is no part of one."""
        return self.index // self.runs[0].cell.samples - max(0, len(self.prompt.turns) - 1)

    @property
    def lacking(self) -> list[RunWriter]:
        """Those of its runs for which it is still to be computed."""
        return [run for run in self.runs if not run.ended and not run.has(self.index)]


def turns(runs: Sequence[RunWriter]) -> list[WorkItem]:
    """Every example that one of the runs lacks, in order. The runs read the same prompts, up to limits of their own."""
    longest = max((run.prompts for run in runs), key=len, default=())
    missing = [(run, set(run.missing)) for run in runs]
    shared = (tuple(run for run, lacks in missing if index in lacks) for index in range(len(longest)))
    return [
        WorkItem(i, prompt, lacking) for i, (prompt, lacking) in enumerate(zip(longest, shared, strict=True)) if lacking
    ]


class OrderedWriter:
    """Writes an example when all runs that lack it have it, so that a killed sweep compares the same examples."""

    def __init__(self, turns: Iterable[WorkItem]) -> None:
        self._open = deque(turns)

    def write(self) -> None:
        """Write every example that is complete, and whose predecessors are; runs set apart keep nobody waiting."""
        while self._open and all(run.apart for run in self._open[0].lacking):
            turn = self._open.popleft()
            for run in turn.runs:
                run.write(before=turn.index + 1)

"""The examples that runs need, and the order in which they are computed and written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvbench.engine.run_writer import RunWriter
from kvbench.engine.sequence import Request
from kvbench.models.prompts import Prompt


@dataclass
class WorkItem:
    """One example and the runs that need it. request: made at its first admission."""

    index: int
    prompt: Prompt
    runs: Sequence[RunWriter]
    request: Request | None = None

    @property
    def conversation(self) -> int:
        """A number that all turns of a conversation share: the example of its first turn."""
        return self.index // self.runs[0].run.samples - max(0, len(self.prompt.turns) - 1)

    @property
    def missing(self) -> list[RunWriter]:
        """The runs for which its sample is still to be computed."""
        return [run for run in self.runs if not run.ended and not run.has(self.index)]

    @property
    def live(self) -> list[RunWriter]:
        """The runs for which it is to be computed now."""
        return [run for run in self.runs if not (run.ended or run.run_alone)]


def work_items(runs: Sequence[RunWriter]) -> list[WorkItem]:
    """Every example that one of the runs needs, in order. The runs have equal prompts, up to their limits."""
    longest = max((run.prompts for run in runs), key=len, default=())
    needed = [(run, set(_needed(run))) for run in runs if not run.ended]
    needing = (tuple(run for run, indices in needed if index in indices) for index in range(len(longest)))
    return [WorkItem(i, prompt, some) for i, (prompt, some) in enumerate(zip(longest, needing, strict=True)) if some]


def _needed(run: RunWriter) -> Iterator[int]:
    """The missing examples of a run, and the turns whose answers are in the history of a missing one."""
    for index in run.missing:
        earlier = len(run.prompts[index].turns) - 1 if run.prompts[index].own else 0
        yield from range(index - earlier, index + 1)


class OrderedWriter:
    """Writes an example once all of its runs have it, so that the runs of a killed sweep have the same examples."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._open = deque(items)

    def write(self) -> None:
        """Write every example that is complete after complete ones; runs that are computed alone are not waited for."""
        while self._open and all(run.run_alone for run in self._open[0].missing):
            item = self._open.popleft()
            for run in item.runs:
                run.write(before=item.index + 1)


def one_by_one(items: Sequence[WorkItem]) -> Iterator[WorkItem]:
    """Every item for one run after the other; a run computes all turns of a conversation before the next run."""
    for _, group in groupby(items, key=lambda item: item.conversation):
        turns = list(group)
        for run in {run: None for turn in turns for run in turn.runs}:
            for turn in sorted(turns, key=lambda turn: turn.prompt.sample or 0):
                if run in turn.runs:
                    yield replace(turn, runs=[run])

"""What became of a cell, in one sentence and one exit code."""

from __future__ import annotations

import errno
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.records.locks import RunBusyError, RunLostError
from kvbench.terminal.command import FAILED, say
from kvbench.terminal.command import explain as otherwise
from kvbench.terminal.signals import exit_code as interrupted


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: the folder of its results, or the sentence that says why there are none."""

    title: str
    limit: int | None = None
    folder: Path | None = None
    error: str | None = None
    code: int = 0


class Told:
    """What is wrong with cells: each sentence is said once, with the first cell that it is true of."""

    def __init__(self) -> None:
        self._said: Counter[str] = Counter()

    def tell(self, title: str, sentence: str, error: BaseException | None = None) -> None:
        """Say it of one cell, unless it was said. error: whose traceback is shown too."""
        self._said[sentence] += 1
        if self._said[sentence] == 1:
            say(f"{title}: {sentence}", error)

    def rest(self) -> None:
        """Say of how many more each of them is true."""
        for sentence, count in self._said.items():
            if count > 1:
                say(f"{count - 1} more {'cell has' if count == 2 else 'cells have'} the same problem: {sentence}")
        self._said.clear()


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the one sentence for an error of a sweep, or of one cell."""
    if isinstance(error, KeyboardInterrupt):
        return interrupted(error), "interrupted; finished examples are kept, the same command continues"
    if isinstance(error, RunBusyError | RunLostError):
        return FAILED, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FAILED, f"no space left to write results ({error.strerror}); finished examples are kept, free some space"
    return otherwise(error, "debug=true")


def exit_code(codes: Sequence[int]) -> int:
    """The code of several cells: something that failed while running outweighs a wrong value."""
    wrong = set(codes) - {0}
    return FAILED if FAILED in wrong else max(wrong, default=0)


def finish(outcomes: Sequence[Outcome], shows: bool = True) -> int:
    """Print the table of all cells that have results, in their order, and return the exit code of them all.

    shows: False: no table.
    """
    from kvbench.analysis.load import read_result
    from kvbench.report.table import print_table

    runs = [read_result(outcome.folder, outcome.limit) for outcome in outcomes if outcome.folder and shows]
    if runs:
        print_table(runs)
    if len(runs) > 1:
        sys.stdout.write(f"results: {runs[0].folder.parent}\n")
    failed = sum(outcome.code != 0 for outcome in outcomes)
    if failed and len(outcomes) > 1:
        say(f"{failed} of {len(outcomes)} cells failed")
    return exit_code([outcome.code for outcome in outcomes])

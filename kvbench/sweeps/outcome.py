"""The result of a run: the folder of its results, or the error message that says why there are none."""

from __future__ import annotations

import errno
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.results.locks import RunBusyError, RunLostError
from kvbench.terminal.command import write_message


@dataclass(frozen=True)
class Outcome:
    """key: of the run in its sweep. folder: None if there are no results. error: also of a run with failed examples."""

    key: str
    title: str
    limit: int | None = None
    folder: Path | None = None
    error: str | None = None
    score: float | None = None


class Messages:
    """Error messages of runs: each is printed once, with the first run that it concerns."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def print(self, title: str, message: str, error: BaseException | None = None) -> None:
        """Print the message of one run unless it was printed. error: its traceback is printed too."""
        self._counts[message] += 1
        if self._counts[message] == 1:
            write_message(f"{title}: {message}", error)

    def print_counts(self) -> None:
        """Print how many more runs each message concerns."""
        for message, count in self._counts.items():
            if count > 1:
                write_message(
                    f"{count - 1} more {'run has' if count == 2 else 'runs have'} the same problem: {message}"
                )
        self._counts.clear()


def message_of(error: BaseException) -> str:
    """The error message for a run that failed."""
    if isinstance(error, UsageError | RunBusyError | RunLostError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left to write results ({error.strerror}); finished examples are kept, free some space"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"


def is_expected(error: BaseException) -> bool:
    """Whether an error concerns the user or the machine, so that its traceback would not help."""
    return isinstance(error, UsageError | RunBusyError | RunLostError | OSError)


def print_results(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Print the table of all runs that have results; their scores by key."""
    from kvbench.report.table import print_table
    from kvbench.results.load import read_result

    found = {outcome.key: read_result(outcome.folder, outcome.limit) for outcome in outcomes if outcome.folder}
    runs = list(found.values())
    if runs:
        print_table(runs)
    if len(runs) > 1:
        sys.stdout.write(f"results: {runs[0].folder.parent}\n")
    sys.stdout.flush()
    return {key: run.value for key, run in found.items()}

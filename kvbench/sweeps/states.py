"""What became of a sweep's cells as far as its folder says: after workers or jobs have ended, however they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.records.cell_state import examples, failure, is_complete, read_states
from kvbench.records.definition import Entry
from kvbench.sweeps.outcome import Outcome, Told
from kvbench.terminal.command import FAILED

if TYPE_CHECKING:
    from kvbench.report.trackers.watching import SweepWatch

_NOT_FINISHED = "not finished, the same command continues"


def outcomes_on_disk(
    out: Path, entries: Sequence[Entry], begun_only: bool = False, why: Mapping[str, str] | None = None
) -> list[Outcome]:
    """The outcome of every cell, in order; what went wrong is said.

    begun_only: not of cells that did not end. why: what is known of those that did not, by their keys.
    """
    pairs = [(entry, _outcome(out, entry, (why or {}).get(entry.key))) for entry in entries]
    pairs = [(entry, outcome) for entry, outcome in pairs if not (begun_only and outcome.error == _NOT_FINISHED)]
    told = Told()
    for entry, outcome in pairs:
        if outcome.error and entry.run_id is not None:  # else it was said when it was planned
            told.tell(outcome.title, outcome.error)
    told.rest()
    return [outcome for _, outcome in pairs]


def tell_whole(tracker: SweepWatch, out: Path, entries: Sequence[Entry]) -> None:
    """Tell a tracker of all cells that have results, whoever computed them, and that nothing more will come."""
    from kvbench.analysis.load import read_result  # not for a folder's status
    from kvbench.report.trackers.watching import Quiet

    done = []
    for entry in entries if not isinstance(tracker, Quiet) else ():
        with suppress(ValueError):  # a damaged file was told
            if examples(out / entry.key)[0]:
                done.append(read_result(out / entry.key, entry.limit))
    tracker.close(done)


def _outcome(out: Path, entry: Entry, why: str | None) -> Outcome:
    if entry.run_id is None:
        return Outcome(entry.title, error=entry.error, code=entry.code)
    if is_complete(out, entry):
        broke = broken(out / entry.run_id)
        return Outcome(entry.title, entry.limit, out / entry.run_id, broke, FAILED if broke else 0)
    failed = failure(read_states(out, entry.run_id))
    if failed is not None:
        return Outcome(entry.title, error=why or failed.error, code=failed.code)
    return Outcome(entry.title, error=why or _NOT_FINISHED, code=FAILED)


def broken(folder: Path) -> str | None:
    """The sentence for a complete run with examples that failed; None where none did."""
    n, failed = examples(folder)
    return f"{failed} of {n} examples failed, see {folder}" if failed else None

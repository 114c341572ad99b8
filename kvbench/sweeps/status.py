"""How far every cell of a sweep is, from the files in its folder and from SLURM's queue."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvbench.records.cell_state import CellState, examples, failure, is_complete, read_states
from kvbench.records.definition import Definition, Entry
from kvbench.records.locks import Owner, holder
from kvbench.records.retries import drop_failed
from kvbench.records.samples import FILE_NAME
from kvbench.records.shards import SHARD_FILE, indices
from kvbench.sweeps.jobs import LOGS, NOT_GIVEN, Given, given_cells
from kvbench.sweeps.states import broken
from kvbench.sweeps.waiting import examples_done, totals

_AGAIN = "resume tries those again that ran out of memory, resume --failed all of them"
FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "left"


@dataclass(frozen=True)
class Status:
    """How far a cell is. sentence: why it failed, or waits. rate: examples per second since it was begun last.

    where: the processes or the job that have it. jobs: those of SLURM's array tasks that wait or run for it; owners:
    the processes that compute it. broke: how many of its examples failed, where all are on disk.
    """

    entry: Entry
    state: str
    done: int = 0
    total: int | None = None
    rate: float | None = None
    where: str = ""
    sentence: str = ""
    log: str | None = None
    jobs: tuple[str, ...] = ()
    owners: tuple[Owner, ...] = ()
    broke: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it can be launched, and nobody has it."""
        return self.state in (FAILED, LEFT) and self.entry.error is None and not self.broke

    @property
    def why(self) -> str:
        """Why it failed, and where more is said."""
        return f"{self.sentence} (log: {self.log})" if self.log else self.sentence

    @property
    def remaining(self) -> float | None:
        """Seconds it will take at this rate."""
        return None if not self.rate or self.total is None else (self.total - self.done) / self.rate


def statuses(out: Path, definition: Definition) -> list[Status]:
    """How far every cell of a sweep is, in its order."""
    given, cells = given_cells(out), definition.cells
    return [
        _status(out, entry, total, given.get(entry.key, NOT_GIVEN))
        for entry, total in zip(cells, totals(out, cells), strict=True)
    ]


def _status(out: Path, entry: Entry, total: int | None, given: Given) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, sentence=entry.error or "")
    folder, said = out / entry.run_id, read_states(out, entry.run_id)
    # Owners before results: whoever completes a cell writes its results first and lets go of it then.
    held = {place: owner for place in (folder, *said) if (owner := holder(place)) is not None}
    # A lock may outlive its job where the node was lost, and may not be seen from here: SLURM knows better.
    owners = {owner for owner in held.values() if owner.job not in given.tasks or owner.job in given.living}
    running = given.running(note for note in said.values() if note.error is None)
    done = examples_done(out, entry)
    if is_complete(out, entry):
        total = done if entry.limit is None else min(done, entry.limit)
        ended = Status(entry, FINISHED, total, total, where=", ".join(given.tasks))
        why, jobs = f"{broken(folder)}; {_AGAIN}", tuple(given.living)
        broke = examples(folder)[1]
        return replace(ended, state=FAILED, broke=broke, sentence=why, jobs=jobs) if broke else ended
    begun = Status(entry, LEFT, done, total, jobs=tuple(given.living))
    if owners or running:
        where = ", ".join(sorted({owner.job or str(owner) for owner in owners} | running))
        rate = _rate({place: note for place, note in said.items() if place in held} or said)
        return replace(begun, state=RUNNING, rate=rate, where=where, owners=tuple(owners))
    return _idle(out, begun, failure(said), given)


def _idle(out: Path, begun: Status, failed: CellState | None, given: Given) -> Status:
    """The status of a cell that is not complete and that nobody computes."""
    waiting = sorted(given.living.keys() - {t for t in given.running([failed]) if given.living[t].state == "RUNNING"})
    if waiting:
        return replace(begun, state=QUEUED, where=", ".join(waiting), sentence=given.living[waiting[0]].about)
    begun = replace(begun, where=", ".join(given.tasks))
    try:
        examples(out / begun.entry.key)
    except ValueError as error:
        return replace(begun, state=FAILED, sentence=str(error))
    if failed is not None:
        return replace(begun, state=FAILED, sentence=failed.error or "", log=failed.log)
    if not given.tasks:
        return begun
    task, ended = given.ended
    became = ended.sentence if ended else "is gone, SLURM knows nothing of it"
    return replace(begun, state=FAILED, sentence=f"job {task} {became}", log=str(out / LOGS / f"{task}.log"))


def retried(out: Path, definition: Definition, every: bool = False) -> list[Status]:
    """How far every cell is, once failed examples that are to be tried again are missing ones: see `drop_failed`."""
    found = statuses(out, definition)
    idle = [s for s in found if s.entry.run_id and s.state in (FAILED, LEFT) and not s.jobs]
    dropped = sum(drop_failed(out / s.entry.key, every) for s in idle)
    return statuses(out, definition) if dropped else found


def _rate(said: Mapping[Path, CellState]) -> float | None:
    """Examples per second since the cell, or those of its shards that run, were begun last."""
    now, rate = time.time(), 0.0
    for place, note in said.items():
        done = len(indices(place / FILE_NAME) | indices(place / SHARD_FILE))
        rate += max(done - note.done, 0) / max(now - note.since, 1e-3)
    return rate or None


def print_status(found: Sequence[Status]) -> None:
    """A row for each cell, then why some failed, then how many there are of each kind."""
    console = Console(file=sys.stdout, width=10_000, highlight=False)
    with console.capture() as text:
        console.print(_table(found))
    lines = [line.rstrip() for line in text.get().splitlines()]
    for s in found:
        if s.state == FAILED:
            lines.append(f"{s.entry.title}: {s.why}")
    sys.stdout.write("\n".join([*lines, _counts(found)]) + "\n")


def _table(found: Sequence[Status]) -> Table:
    table = Table(box=None)
    for name, side in (("cell", "left"), ("state", "left"), ("examples", "right"), ("per min", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("remaining", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for s in found:
        rate = "" if s.rate is None else f"{60 * s.rate:.3g}"
        examples = f"{s.done}/{'?' if s.total is None else s.total}" if s.entry.run_id else "-"
        about = f" ({s.sentence})" if s.state == QUEUED and s.sentence not in ("", "None") else ""
        table.add_row(s.entry.title, s.state, examples, rate, _duration(s.remaining), s.where + about)
    return table


def _counts(found: Sequence[Status]) -> str:
    counts = Counter(s.state for s in found)
    listed = ", ".join(f"{counts[name]} {name}" for name in (FINISHED, RUNNING, QUEUED, FAILED, LEFT) if counts[name])
    done, known = sum(s.done for s in found), [s.total for s in found if s.entry.run_id]
    total = "?" if None in known else sum(n for n in known if n is not None)
    broke = sum(s.broke for s in found)
    failed = f", {broke} failed" if broke else ""
    return f"{len(found)} cell{'s' * (len(found) != 1)}: {listed}; {done} of {total} examples{failed}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

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

from kvbench.runs.cell_state import CellState, failure, is_complete, read_states
from kvbench.runs.claims import Owner, look, owner_of
from kvbench.runs.definition import Definition, Entry
from kvbench.runs.samples import FILE_NAME
from kvbench.runs.shards import SHARD_FILE, indices
from kvbench.sweeps.jobs import LOGS, NOT_GIVEN, Given, given_cells
from kvbench.sweeps.waiting import examples_done, totals

FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "left"


@dataclass(frozen=True)
class Status:
    """How far a cell is. sentence: why it failed, or waits. rate: examples per second since it was begun last.

    where: the processes or the job that have it. jobs: those of SLURM's array tasks that wait or run for it; owners:
    the processes that compute it.
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
    said = read_states(out, entry.run_id)
    # Owners before results: whoever completes a cell writes its results first and lets go of it then.
    places = {out / entry.run_id, *said}
    living = {o for place in places if (o := owner_of(place)) is not None and look(place) is not True}
    owners = sorted((o for o in living if o.job is None or given.runs(o.job)), key=str)
    done = examples_done(out, entry)
    if is_complete(out, entry):
        total = done if entry.limit is None else min(done, entry.limit)
        return Status(entry, FINISHED, total, total, where=", ".join(given.tasks))
    begun = Status(entry, LEFT, done, total, jobs=tuple(given.living))
    if owners:
        where = ", ".join(owner.job or str(owner) for owner in owners)
        return replace(begun, state=RUNNING, rate=_rate(said), where=where, owners=tuple(owners))
    return _idle(out, begun, failure(said), given)


def _idle(out: Path, begun: Status, failed: CellState | None, given: Given) -> Status:
    """The status of a cell that is not complete and that nobody computes."""
    waiting = [task for task, job in given.living.items() if not (job.state == "RUNNING" and given.wrote(failed))]
    if waiting:
        return replace(begun, state=QUEUED, where=", ".join(waiting), sentence=given.living[waiting[0]].about)
    begun = replace(begun, where=", ".join(given.tasks))
    if failed is not None:
        return replace(begun, state=FAILED, sentence=failed.error or "", log=failed.log)
    if not given.tasks:
        return begun
    task, ended = given.ended
    became = ended.sentence if ended else "is gone, SLURM knows nothing of it"
    return replace(begun, state=FAILED, sentence=f"job {task} {became}", log=str(out / LOGS / f"{task}.log"))


def _rate(said: Mapping[Path, CellState]) -> float | None:
    """Examples per second since the cell, or those of its shards that run, were begun last."""
    now, rate = time.time(), 0.0
    for place, state in said.items():
        if state.state == "running":
            done = len(indices(place / FILE_NAME) | indices(place / SHARD_FILE))
            rate += max(done - state.done, 0) / max(now - state.since, 1e-3)
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
    return f"{len(found)} cell{'s' * (len(found) != 1)}: {listed}; {done} of {total} examples"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

"""Following, stopping and continuing a sweep from outside: none of it is needed for its jobs to go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.records.cell_state import state_path
from kvbench.records.definition import Definition, Entry, drop_cells, read_definition
from kvbench.sweeps import queue
from kvbench.sweeps.outcome import finish
from kvbench.sweeps.states import outcomes_on_disk, tell_whole
from kvbench.sweeps.status import FAILED, LEFT, QUEUED, RUNNING, retried, statuses
from kvbench.sweeps.waiting import sample_meter
from kvbench.terminal.command import WRONG, say
from kvbench.terminal.errors import UsageError

LOOK_SECONDS, ASK_SECONDS = 1.0, 10.0  # at the files, and at SLURM


def wait_for(out: Path, entries: Sequence[Entry], shows: bool = True) -> int:
    """Wait until none of the cells is queued or running, print their table (`shows`) and return their exit code."""
    keys = {entry.key for entry in entries}
    definition = read_definition(out)
    try:
        with sample_meter(out, entries) as look:
            while any(s.state in (QUEUED, RUNNING) for s in statuses(out, definition) if s.entry.key in keys):
                asked = time.monotonic()
                while time.monotonic() - asked < ASK_SECONDS:
                    look()
                    time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        say(f"no longer waiting; nothing was stopped: python -m kvbench.sweep cancel {out} does that")
        return 130
    why = {s.entry.key: s.why for s in statuses(out, definition) if s.state == FAILED}
    if entries:
        from kvbench.report.trackers.watching import make_watch  # imports torch, which waiting need not

        tell_whole(make_watch(entries[0].config["logger"], definition.name), out, definition.cells)
    return finish(outcomes_on_disk(out, entries, why=why), shows)


def cancel(out: Path) -> int:
    """End everything that computes the sweep: its jobs, and processes of this machine."""
    found = statuses(out, read_definition(out))
    processes = set()
    for owner in {owner for status in found for owner in status.owners if owner.job is None}:
        if not owner.is_here:
            say(f"{owner} has to be stopped there")
        elif owner.pid != os.getpid():
            processes.add(owner.pid)
    for pid in processes:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGTERM)
    jobs = sorted({job for status in found for job in status.jobs})
    if jobs:
        queue.cancel(jobs)
    told = f"{len(jobs)} job{'s' * (len(jobs) != 1)}, {len(processes)} process{'es' * (len(processes) != 1)}"
    sys.stdout.write(f"cancelled: {told}; finished examples are kept, resume continues\n")
    return 0


def resume(out: Path, fields: Sequence[str], every: bool = False) -> int:
    """Launch again what is neither finished nor queued nor running, as the sweep was launched or as `fields` say.

    every: examples that failed are all computed again, not only those that ran out of memory.
    """
    definition = read_definition(out)
    config = _launcher(definition, fields)
    found = retried(out, definition, every)
    left = [s.entry for s in found if s.is_open]
    if not left:
        broke = sum(s.broke for s in found)
        say("nothing is left to do" + (f": {broke} examples failed, resume --failed tries them again" if broke else ""))
        return 0
    return _launch(out, definition, config, left)


def _launch(out: Path, definition: Definition, config: dict[str, Any], left: Sequence[Entry]) -> int:
    here = out.resolve()
    os.chdir(definition.folder)  # the paths in its cells are read from there
    sys.path.insert(0, definition.folder)  # so are parts of one's own, as `python -m` found them there
    from kvbench.sweeps.launcher import Sweep, make_launcher  # seconds of torch: not where nothing is left
    from kvbench.sweeps.plan import rebuilt

    launcher = make_launcher(config)
    planned, wrong = [], 0
    for entry in left:
        try:
            planned.append(rebuilt(entry, here, elsewhere=launcher.elsewhere))
        except UsageError as error:
            say(f"{entry.title}: {error}")
            wrong = WRONG
    code = launcher.launch(Sweep(here, planned, definition)) if planned else 0
    return code or wrong


def forget(out: Path, words: Sequence[str]) -> int:
    """Take cells out of the sweep that failed, or, where `words` of their titles are given, that are not finished.

    What lies in their folders stays. Raises UsageError where there is no such cell.
    """
    definition = read_definition(out)
    states = (FAILED, LEFT) if words else (FAILED,)
    open_ = [s.entry for s in statuses(out, definition) if s.state in states and not s.broke and not s.jobs]
    gone = [entry for entry in open_ if set(words) <= set(entry.title.split())]
    if not gone:
        which = f"no cell {' '.join(words)}" if words else "no cell that failed"
        raise UsageError(f"{out} has {which}: those that are finished, queued or running stay")
    drop_cells(out, [entry.key for entry in gone])
    for entry in gone:
        state_path(out, entry.key).unlink(missing_ok=True)
    titles = "".join(f"  {entry.title}\n" for entry in gone)
    sys.stdout.write(f"forgot {len(gone)} of {len(definition.cells)} cells:\n{titles}")
    return 0


def _launcher(definition: Definition, fields: Sequence[str]) -> dict[str, Any]:
    """What describes the launcher of a sweep, with fields set anew: `launcher.timeout_min=600`, `launcher=local`."""
    given = [field for field in fields if field.startswith("launcher=")]
    others = [field for field in fields if field.partition("=")[0].partition(".")[0] != "launcher"]
    if others:
        raise UsageError(
            f"{others[0]} cannot be set: what a sweep computes is fixed, its launcher's fields are not, such as "
            "launcher.timeout_min=600"
        )
    if given:
        return _node(fields)
    kind = str(definition.launcher["_target_"]).rpartition(".")[2].lower()
    asked = _node([f"launcher={kind}", *fields])
    names = {field.partition("=")[0].lstrip("+").removeprefix("launcher.") for field in fields}
    return {**definition.launcher, **{name: asked[name] for name in names}}


def _node(overrides: Sequence[str]) -> dict[str, Any]:
    from kvbench.config.overrides import check  # Hydra: not for the other commands

    launcher: dict[str, Any] = check(overrides).first.config["launcher"]
    return launcher

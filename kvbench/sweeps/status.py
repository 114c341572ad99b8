"""`python -m kvbench.sweep status|wait|resume|cancel FOLDER`: follow, stop or continue the sweep in a folder."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from kvbench.errors import UsageError
from kvbench.results.definition import Definition, Entry, read_definition
from kvbench.results.locks import is_held
from kvbench.results.run_state import examples, is_complete, lines, read_state
from kvbench.sweeps.jobs import Launcher, is_active, submitted
from kvbench.terminal.command import FAILED as EXIT_FAILED
from kvbench.terminal.command import Parser, command, pairs
from kvbench.terminal.console import log_to_stderr, share_cores

if TYPE_CHECKING:
    import submitit

FINISHED, RUNNING, QUEUED, FAILED, LEFT = "finished", "running", "queued", "failed", "not finished"
STATES = (FINISHED, RUNNING, QUEUED, FAILED, LEFT)


@dataclass(frozen=True)
class Status:
    """The progress of a run. total: None if it is unknown. job: its newest one, if it was submitted."""

    entry: Entry
    state: str
    done: int = 0
    total: int | None = None
    error: str | None = None
    job: submitit.Job[None] | None = None


def statuses(out: Path, definition: Definition) -> list[Status]:
    """The progress of every run of a sweep, in its order."""
    jobs = submitted(out)
    totals: dict[str, int] = {}
    for entry in definition.cells:
        state = None if entry.run_id is None else read_state(out, entry.run_id)
        if state is not None and state.in_task is not None:
            totals[entry.group] = state.in_task
    return [_status(out, entry, jobs.get(entry.key), totals.get(entry.group)) for entry in definition.cells]


def _status(out: Path, entry: Entry, job: submitit.Job[None] | None, in_task: int | None) -> Status:
    if entry.run_id is None:
        return Status(entry, FAILED, error=entry.error)
    folder, state = out / entry.run_id, read_state(out, entry.run_id)
    known = [number for number in (in_task, entry.limit) if number is not None]
    total, done = min(known, default=None), lines(folder)

    def status(word: str, error: str | None = None) -> Status:
        return Status(entry, word, done, total, error, job)

    if is_held(folder):
        return status(RUNNING)
    if is_complete(out, entry):
        failed = examples(folder)[1]
        return status(FAILED, f"{failed} of {done} examples failed, see {folder}") if failed else status(FINISHED)
    if job is not None and is_active(job):
        return status(QUEUED)
    if state is not None and state.error is not None:
        return status(FAILED, state.error)
    if job is not None:
        return status(FAILED, f"job {job.job_id} ended ({job.state}), its log is {job.paths.stderr}")
    return status(LEFT)


def print_statuses(found: Sequence[Status]) -> None:
    """A line for each run, the errors, and how many runs there are of each state."""
    width = max(len(one.entry.title) for one in found)
    for one in found:
        numbers = f"{one.done}/{'?' if one.total is None else one.total}"
        job = "" if one.job is None else f"  job {one.job.job_id}"
        sys.stdout.write(f"{one.entry.title:{width}}  {one.state:12}  {numbers:>9}{job}\n")
    for one in found:
        if one.error is not None:
            sys.stdout.write(f"{one.entry.title}: {one.error}\n")
    counts = Counter(one.state for one in found)
    listed = ", ".join(
        f"{counts[state]} {state}" for state in (FINISHED, RUNNING, QUEUED, FAILED, LEFT) if counts[state]
    )
    sys.stdout.write(f"{len(found)} run{'s' * (len(found) != 1)}: {listed}\n")


def resume(out: Path, fields: Sequence[str]) -> int:
    """Compute or submit again what is neither finished nor queued nor running; returns the exit code.

    fields: of the launcher, in place of those of the last command. Failed examples are computed again.
    """
    definition = read_definition(out)
    left = [one.entry for one in statuses(out, definition) if one.state in (FAILED, LEFT) and one.entry.run_id]
    if not left:
        sys.stdout.write("nothing is left to do\n")
        return 0
    changed = {key.removeprefix("hydra.launcher."): yaml.safe_load(value) for key, value in _fields(fields).items()}
    try:
        launcher = Launcher(**{**definition.launcher, **changed})
    except TypeError as error:
        raise UsageError(f"{' '.join(fields)} is not allowed: {error}") from error
    here = out.resolve()
    os.chdir(definition.folder)  # the paths in its runs are relative to it
    sys.path.insert(0, definition.folder)  # so are the user's own modules
    share_cores()
    from kvbench.sweeps.launch import launch  # torch, which the other commands need not wait for
    from kvbench.sweeps.plan import Planned, rebuilt

    elsewhere = not launcher.in_process
    runs = [Planned(entry) if elsewhere else rebuilt(entry, here) for entry in left]
    return _exit_code([outcome.error for outcome in launch(here, runs, definition, launcher)])


def _fields(fields: Sequence[str]) -> dict[str, str]:
    found = pairs(fields, "hydra.launcher.timeout_min=600")
    for key in found:
        if not key.startswith("hydra.launcher."):
            raise UsageError(
                f"{key}= cannot be set: only fields of the launcher, such as hydra.launcher.timeout_min=600"
            )
    return found


def cancel(out: Path) -> int:
    """Cancel the jobs of a sweep; finished examples are kept."""
    jobs = {
        one.job.job_id: one.job
        for one in statuses(out, read_definition(out))
        if one.job and one.state in (RUNNING, QUEUED)
    }
    for job in jobs.values():
        if job.state == "NO PROCESS AND NO RESULT":  # a process of this machine that another command started
            with suppress(ProcessLookupError):
                os.kill(int(job.job_id), signal.SIGINT)
        else:
            job.cancel()
    sys.stdout.write(f"cancelled {len(jobs)} jobs; finished examples are kept\n")
    return 0


def _wait(out: Path) -> int:
    from kvbench.sweeps.launch import outcomes_on_disk, wait
    from kvbench.sweeps.outcome import print_results

    entries = read_definition(out).cells
    wait(out, entries)
    outcomes = outcomes_on_disk(out, entries)
    print_results(outcomes)
    for outcome in outcomes:
        if outcome.error is not None:
            sys.stderr.write(f"kvbench: {outcome.title}: {outcome.error}\n")
    return _exit_code([outcome.error for outcome in outcomes])


def _exit_code(errors: Sequence[str | None]) -> int:
    return EXIT_FAILED if any(error is not None for error in errors) else 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser("python -m kvbench.sweep", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    texts = {
        "status": "the progress of every run",
        "wait": "wait until nothing is queued or running, then print the table",
        "resume": "compute or submit again what is left, and failed examples",
        "cancel": "cancel the jobs; finished examples are kept",
    }
    for name, text in texts.items():
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("folder", type=Path, help="folder of the results, `out` of the sweep")
    commands.choices["resume"].add_argument("fields", nargs="*", help="changed fields: hydra.launcher.timeout_min=600")
    asked = parser.parse_args(arguments)
    log_to_stderr()
    if asked.command == "status":
        print_statuses(statuses(asked.folder, read_definition(asked.folder)))
        return 0
    if asked.command == "resume":
        return resume(asked.folder, asked.fields)
    return _wait(asked.folder) if asked.command == "wait" else cancel(asked.folder)

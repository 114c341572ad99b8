"""Launch the runs of a sweep: compute them in this process, or submit them as jobs, and print their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.results.definition import Definition, Entry, sweep_name, write_definition
from kvbench.results.load import read_result
from kvbench.results.session import versions
from kvbench.run.run import out_folder
from kvbench.sweeps.compute import Composed, NoLogger, Planned, compute, make_watch, plan, print_plan
from kvbench.sweeps.jobs import ACTIVE, FINISHED, Launcher, Status, is_active, statuses, submit, submitted
from kvbench.terminal.command import write_message

POLL_SECONDS = 1.0


def run_sweep(composed: Sequence[Composed], command: str, launcher: Launcher) -> list[Status]:
    """Compute or submit the runs of a sweep and print their table; the status of each configuration, in order."""
    out = out_folder(_same("out", composed))
    _same("logger", composed)
    runs, keys = plan(composed, elsewhere=launcher.cluster == "slurm")
    if any(one.config["dry_run"] is True for one in composed):
        print_plan(runs)
        found = [Status(one.entry, FINISHED) for one in runs]
    else:
        name = sweep_name(out, composed[0].choices.get("experiment"))
        entries = tuple(one.entry for one in runs)
        sweep = Definition(name, (command,), str(Path.cwd()), vars(launcher), versions(), entries)
        found = launch(out, runs, write_definition(out, sweep), launcher)
    by_key = {status.entry.key: status for status in found}
    return [by_key[key] for key in keys]


def _same(name: str, composed: Sequence[Composed]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value that all configurations of a sweep must share. Raises UsageError."""
    values = [one.config[name] for one in composed]
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all runs of a sweep")
    return values[0]


def launch(out: Path, runs: Sequence[Planned], sweep: Definition, launcher: Launcher) -> list[Status]:
    """Compute or submit planned runs of a sweep; a run that fails does not stop the others."""
    entries = [one.entry for one in runs]
    if launcher.in_process:
        tracker = make_watch(entries[0].config["logger"], sweep.name)
        try:
            compute(runs, out, tracker)
        except KeyboardInterrupt:
            print_results(out, entries)
            raise
        finally:
            tracked = () if isinstance(tracker, NoLogger) else statuses(out, sweep.runs)
            tracker.close([read_result(out / one.entry.key, one.entry.limit) for one in tracked if one.complete])
        return print_results(out, entries)
    _submit(out, entries, sweep.name, launcher)
    if launcher.wait:
        return wait(out, entries)
    return [Status(entry, FINISHED, error=entry.error) for entry in entries]


def _submit(out: Path, entries: Sequence[Entry], name: str, launcher: Launcher) -> None:
    """Submit the runs that are neither complete nor queued nor running."""
    left = [one.entry for one in statuses(out, entries) if one.entry.run_id and not one.complete]
    before = submitted(out)
    left = [entry for entry in left if entry.key not in before or not is_active(before[entry.key])]
    if not left:
        write_message("nothing to submit: all runs are complete, queued or running")
        return
    jobs = submit(out, name, left, launcher)
    ids = ", ".join(job.job_id for job in jobs)
    sys.stdout.write(f"submitted {len(left)} runs in {len(jobs)} jobs: {ids}\n")
    if not launcher.wait:
        sys.stdout.write(f"python -m kvbench.sweep status {out}\npython -m kvbench.sweep wait {out}\n")


def wait(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Wait until no job of these runs is queued or running, and print errors and the table."""
    keys = {entry.key for entry in entries}
    jobs = {job.job_id: job for key, job in submitted(out).items() if key in keys}
    while any(is_active(job) for job in jobs.values()):
        time.sleep(POLL_SECONDS)
    found = print_results(out, entries)
    for status in found:
        if status.error is not None:
            write_message(f"{status.entry.title}: {status.error}")
    return found


def print_results(out: Path, entries: Sequence[Entry]) -> list[Status]:
    """Print the table of all complete runs; the status of each run, with its score, or the reason why it has none."""
    found, results = [], []
    for status in statuses(out, entries):
        if status.complete:
            results.append(read_result(out / status.entry.key, status.entry.limit))
            status = replace(status, score=results[-1].value)
        elif status.error is None:
            word = "is computed by another process" if status.state in ACTIVE else "is not finished"
            status = replace(status, error=f"the run {word}; the same command continues it")
        found.append(status)
    if results:
        from kvbench.report.table import print_table  # pandas

        print_table(results)
    if len(results) > 1:
        sys.stdout.write(f"results: {out}\n")
    sys.stdout.flush()
    return found

"""`kvbench sweep status|wait|resume|cancel FOLDER`: follow, continue or stop the sweep in a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from kvbench.errors import UsageError, counted
from kvbench.results.definition import read_definition
from kvbench.sweeps.jobs import (
    FAILED,
    LEFT,
    Launcher,
    Status,
    launch,
    print_statuses,
    statuses,
    stop,
    wait,
)
from kvbench.terminal.command import FAILED as EXIT_FAILED
from kvbench.terminal.command import PATH, Command, leave, log_to_stderr, pairs, program, share_cores


@click.group("sweep", no_args_is_help=False)
def cli() -> None:
    """Follow, continue or stop the sweep in a folder, `out` of its command."""
    log_to_stderr()


main = program(cli)


@cli.command("status", cls=Command)
@click.argument("folder", type=PATH)
def show_status(folder: Path) -> None:
    """Print the progress of every run."""
    print_statuses(statuses(folder, read_definition(folder).runs))


@cli.command("wait", cls=Command)
@click.argument("folder", type=PATH)
def wait_for_runs(folder: Path) -> int:
    """Wait until nothing is queued or running, then print the table. The exit code is 1 if a run failed."""
    return _exit_code(wait(folder, read_definition(folder).runs))


@cli.command("resume", cls=Command)
@click.argument("folder", type=PATH)
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
def resume_runs(folder: Path, fields: Sequence[str]) -> int:
    """Compute or submit again the runs that are left, and failed examples.

    FIELD=VALUE: changed fields of the launcher, such as hydra.launcher.timeout_min=600.
    """
    return _exit_code(resume(folder, fields))


@cli.command("cancel", cls=Command)
@click.argument("folder", type=PATH)
def cancel_jobs(folder: Path) -> None:
    """Cancel the jobs; finished examples are kept."""
    cancel(statuses(folder, read_definition(folder).runs))


def _exit_code(found: Sequence[Status]) -> int:
    return EXIT_FAILED if any(one.error is not None for one in found) else 0


def resume(out: Path, fields: Sequence[str]) -> list[Status]:
    """Compute or submit again the runs that are neither finished nor queued nor running, and failed examples.

    fields: of the launcher; they replace fields of the last command.
    """
    definition = read_definition(out)
    found = statuses(out, definition.runs)
    left = [one.entry for one in found if one.state in (FAILED, LEFT) and one.entry.run_id]
    if not left:
        sys.stdout.write("nothing is left to do\n")
        return []
    launcher = _launcher(definition.launcher, fields)
    here = out.resolve()
    share_cores()
    from kvbench.sweeps.compute import rebuilt  # torch, which the other commands do not need

    runs = {entry.key: rebuilt(entry, here) for entry in left} if launcher.in_process else {}
    return launch(here, left, runs, definition, launcher)


def _launcher(last: dict[str, Any], fields: Sequence[str]) -> Launcher:
    """The launcher of the last command with changed fields."""
    changed = {}
    for key, value in pairs(fields, "hydra.launcher.timeout_min=600").items():
        name = key.removeprefix("hydra.launcher.")
        if name == key or name not in Launcher.__dataclass_fields__:
            raise UsageError(f"{key}= cannot be set: only fields of the launcher, as in hydra.launcher.timeout_min=600")
        changed[name] = yaml.safe_load(value)
    return Launcher(**{**last, **changed})


def cancel(found: Sequence[Status]) -> None:
    """Cancel the jobs of a sweep; finished examples are kept."""
    jobs = {one.job.id: one.job for one in found if one.job is not None and one.job.active}
    running = stop([*jobs.values()])
    sys.stdout.write(f"cancelled {counted(len(jobs) - len(running), 'job')}; examples on disk are kept\n")
    if running:
        raise UsageError(f"still running: {', '.join(job.id for job in running)}")


if __name__ == "__main__":
    leave(main())

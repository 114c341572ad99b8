"""`python -m kvbench.sweep status|wait|resume|cancel FOLDER`: follow, continue or stop the sweep in a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UsageError
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
from kvbench.terminal.command import Parser, command, log_to_stderr, pairs, share_cores

COMMANDS = {
    "status": "print the progress of every run",
    "wait": "wait until nothing is queued or running, then print the table",
    "resume": "compute or submit again the runs that are left, and failed examples",
    "cancel": "cancel the jobs; finished examples are kept",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if a run failed."""
    parser = Parser("python -m kvbench.sweep", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("folder", type=Path, help="folder of the results, `out` of the sweep")
    commands.choices["resume"].add_argument("fields", nargs="*", help="changed fields: hydra.launcher.timeout_min=600")
    options = parser.parse_args(arguments)
    log_to_stderr()
    out: Path = options.folder
    if options.command == "resume":
        return _exit_code(resume(out, options.fields))
    if options.command == "wait":
        return _exit_code(wait(out, read_definition(out).runs))
    found = statuses(out, read_definition(out).runs)
    if options.command == "status":
        print_statuses(found)
    else:
        cancel(found)
    return 0


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
    from kvbench.sweeps.compute import Planned, rebuilt  # torch, which the other commands do not need

    runs = [rebuilt(entry, here) if launcher.in_process else Planned(entry) for entry in left]
    return launch(here, runs, definition, launcher)


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
    sys.stdout.write(f"cancelled {len(jobs) - len(running)} jobs; examples on disk are kept\n")
    if running:
        raise UsageError(f"still running: {', '.join(job.id for job in running)}")


if __name__ == "__main__":
    sys.exit(main())

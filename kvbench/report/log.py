"""`kvbench results log FOLDER logger=wandb`: log finished runs to a tracker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from kvbench.config.completion import complete_overrides
from kvbench.config.compose import names, read, resolved
from kvbench.config.parts import build, refusing_in
from kvbench.errors import UsageError, counted, unknown
from kvbench.results.definition import sweep_name
from kvbench.results.loading import load_results, run_folders
from kvbench.terminal.command import PATH, Command, pairs, quiet


@click.command("log", cls=Command)
@click.argument("folder", type=PATH)
@click.argument("fields", nargs=-1, metavar="logger=NAME [logger.FIELD=VALUE]...", shell_complete=complete_overrides)
def log(folder: Path, fields: Sequence[str]) -> None:
    """Log all finished runs below a folder, and their table: kvbench results log results/runs logger=wandb.

    Runs that are logged already are not doubled online: they keep their id.
    """
    words = pairs(fields, "logger=wandb")
    known = [name for name in names("logger") if name != "none"]
    name = words.pop("logger", "")
    if name not in known:
        raise unknown("logger", name, known)
    run_folders(folder)
    quiet()
    given = {key.removeprefix("logger."): yaml.safe_load(value) for key, value in words.items()}
    rows = [row for row in load_results(folder) if row.finished]
    config: dict[str, Any] = {**read("logger", name), **given}
    with refusing_in("logger", config, "logger: "):
        tracker = build(resolved({"logger": config, "out": str(folder)})["logger"])
        watch = tracker.watch(sweep_name(folder, None))
    if watch is None or not rows:
        raise UsageError(f"{folder} has no finished run" if watch else "logger.mode=disabled logs nothing")
    for row in rows:
        watch.started(row, row.samples, row.n)
    watch.close(rows)
    sys.stdout.write(f"{counted(len(rows), 'run')} -> {tracker.label}\n")

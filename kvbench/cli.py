"""`python -m kvbench`: one cell, or with -m a sweep; errors are one sentence, results one table.

Exit codes: 0 all is well, 1 something failed while running, 2 a wrong value, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from kvbench.config.choices import GROUPS
from kvbench.config.flags import read_flags
from kvbench.config.overrides import Asked, check
from kvbench.config.sweeps import command_lines
from kvbench.sweeps.outcome import explain
from kvbench.terminal.command import WRONG, command, our_version
from kvbench.terminal.console import log_to_stderr, quiet, share_cores
from kvbench.terminal.errors import UsageError

if TYPE_CHECKING:
    from kvbench.config.compose import Combination
    from kvbench.sweeps.launcher import Launcher, Sweep

_SHOWS = ("cfg", "info", "hydra_help", "shell_completion")
"""Hydra's flags that show something and run nothing."""


@partial(command, explains=explain)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        return _help([argument for argument in arguments if argument not in ("-h", "--help")])
    if "--version" in arguments:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    log_to_stderr()
    share_cores()
    asked = [check(line) for line in command_lines(arguments)]
    shows = any(getattr(asked[0].told, name) for name in _SHOWS)
    return _hydra(asked[0]) if shows else _run(asked, arguments)


def _help(arguments: Sequence[str]) -> int:
    """Show what can be set and chosen, in the folder of --config-dir too; of the groups named, what each choice is."""
    from kvbench.config.help import check_topics, group_help, help_text

    told = read_flags(arguments)
    check_topics(told.overrides)
    folders = [Path(told.config_dir)] if told.config_dir else []
    groups = [name for name in GROUPS if name in {argument.partition("=")[0] for argument in told.overrides}]
    sys.stdout.write("\n".join(group_help(group, folders) for group in groups) or help_text(folders))
    return 0


def _run(asked: Sequence[Asked], arguments: Sequence[str]) -> int:
    """Plan all cells, then let the launcher see to them."""
    told = asked[0].told
    if told.config_name or told.config_path or told.experimental_rerun:
        raise UsageError("--config-name, --config-path and --experimental-rerun are not for kvbench: use --config-dir")
    cells = [cell for one in asked for cell in one.cells]
    launcher = _the_one("launcher", [cell.config["launcher"] for cell in cells])
    from kvbench.sweeps.launcher import make_launcher  # seconds of torch: not for --help, nor for a slip

    built = make_launcher(launcher)
    _the_one("logger", [cell.config["logger"] for cell in cells])
    quiet()
    return built.launch(_sweep(asked, cells, arguments, built, launcher))


def _sweep(
    asked: Sequence[Asked],
    cells: Sequence[Combination],
    arguments: Sequence[str],
    launcher: Launcher,
    config: dict[str, Any],
) -> Sweep:
    """The planned cells, kept in their folder where there are several, or where others will compute them."""
    from kvbench.identity.cell import out_folder
    from kvbench.records.definition import sweep_name
    from kvbench.sweeps.launcher import Sweep, defined
    from kvbench.sweeps.plan import plan

    out = out_folder(_the_one("out", [cell.config["out"] for cell in cells]))
    planned = plan(cells, elsewhere=launcher.elsewhere)
    if not any(one.is_sweep for one in asked) and not launcher.hands_on:
        return Sweep(out, planned)
    name = sweep_name(out, asked[0].config.hydra.runtime.choices.get("experiment"))
    return defined(out, planned, name, shlex.join(["python", "-m", "kvbench", *arguments]), config)


def _the_one(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value all cells of a sweep must share. Raises UsageError."""
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all cells of a sweep")
    return values[0]


@hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")
def _show(config: DictConfig) -> None:
    raise AssertionError("Hydra's flags show a configuration, they run nothing")


def _hydra(asked: Asked) -> int:
    """Let Hydra show what one of its flags asks for."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a traceback of its own and exits
    sys.argv = [sys.argv[0], *asked.arguments]
    try:
        _show()
    except SystemExit as done:
        return WRONG if done.code else 0
    return 0

"""`python -m kvbench`: one cell, or with -m a sweep; errors are one sentence, results one table.

Exit codes: 0 all is well, 1 something failed while running, 2 a wrong value, 130 interrupted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.choices import GROUPS
from kvbench.config.flags import read_flags
from kvbench.config.sweeps import command_lines
from kvbench.sweeps.outcome import explain
from kvbench.terminal.command import command, our_version
from kvbench.terminal.console import log_to_stderr, quiet, share_cores
from kvbench.terminal.errors import UsageError

if TYPE_CHECKING:
    from kvbench.config.compose import Combination
    from kvbench.config.overrides import Asked
    from kvbench.sweeps.launcher import Launcher, Sweep


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
    from kvbench.config.overrides import check  # Hydra's grammar is half a second, which --help need not wait for

    asked = [check(line) for line in command_lines(arguments)]
    if asked[0].told.cfg:
        from kvbench.records.files import yaml_text

        sys.stdout.write(yaml_text(asked[0].first.config))
        return 0
    return _run(asked, arguments)


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
    name = sweep_name(out, cells[0].choices.get("experiment"))
    return defined(out, planned, name, shlex.join(["python", "-m", "kvbench", *arguments]), config)


def _the_one(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value all cells of a sweep must share. Raises UsageError."""
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all cells of a sweep")
    return values[0]

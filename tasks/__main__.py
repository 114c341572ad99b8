"""`kvbench tasks`: see `kvbench.tools.catalog`."""

import sys
from pathlib import Path

import click

from kvbench.terminal.command import PATH, Command, program
from kvbench.tools.catalog import complete, show


@click.command("tasks", cls=Command)
@click.argument("name", required=False, shell_complete=complete("task"))
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own tasks.")
def cli(name: str | None, config_dir: Path | None) -> None:
    """All tasks, or the idea and the fields of one: kvbench tasks niah."""
    show("task", name, config_dir)


main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

"""`kvbench models`: see `kvbench.tools.catalog`."""

import sys
from pathlib import Path

import click

from kvbench.terminal.command import PATH, Command, program
from kvbench.tools.catalog import complete, show


@click.command("models", cls=Command)
@click.argument("name", required=False, shell_complete=complete("model"))
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own models.")
def cli(name: str | None, config_dir: Path | None) -> None:
    """All named models, or the fields of one: kvbench models smollm2."""
    show("model", name, config_dir)


main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

"""`kvbench policies`: see `kvbench.tools.catalog`."""

import sys
from pathlib import Path

import click

from kvbench.terminal.command import PATH, Command, program
from kvbench.tools.catalog import complete, show


@click.command("policies", cls=Command)
@click.argument("name", required=False, shell_complete=complete("policy"))
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own policies.")
def cli(name: str | None, config_dir: Path | None) -> None:
    """All policies, or the idea, equation, fields, paper and requirements of one: kvbench policies snapkv."""
    show("policy", name, config_dir)


main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

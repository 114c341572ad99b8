"""`python -m kvbench` is the command `kvbench`."""

from typing import NoReturn

from kvbench.cli import main
from kvbench.terminal.command import leave


def run() -> NoReturn:
    """Run the command line of this process and end it."""
    leave(main())


if __name__ == "__main__":
    run()

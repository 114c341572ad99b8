"""`kvbench score`: see `kvbench.tools.score`."""

from kvbench.terminal.command import leave
from kvbench.tools.score import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    leave(main())

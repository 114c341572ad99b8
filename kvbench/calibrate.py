"""`kvbench calibrate`: see `kvbench.tools.calibrate`."""

from kvbench.terminal.command import leave
from kvbench.tools.calibrate import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    leave(main())

"""`kvbench diagnose`: see `kvbench.tools.diagnose`."""

from kvbench.terminal.command import leave
from kvbench.tools.diagnose import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    leave(main())

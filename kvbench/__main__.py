"""`python -m kvbench`: see `kvbench.cli`."""

from kvbench.cli import main
from kvbench.terminal.console import leave

if __name__ == "__main__":
    leave(main())

"""`python -m kvbench.sweep`: see `kvbench.sweeps.command`."""

from kvbench.sweeps.command import main
from kvbench.terminal.console import leave

if __name__ == "__main__":
    leave(main())

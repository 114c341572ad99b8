"""`python -m kvbench.results`: see `kvbench.report.command`."""

from kvbench.report.command import main
from kvbench.terminal.console import leave

if __name__ == "__main__":
    leave(main())

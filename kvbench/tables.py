"""`python -m kvbench.tables`: the papers' tables, printed and beside our runs; see `kvbench.papers.cli`."""

from kvbench.papers.cli import main
from kvbench.terminal.console import leave

if __name__ == "__main__":
    leave(main())

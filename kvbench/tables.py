"""`kvbench tables`: published tables, compared with runs; see `kvbench.papers.cli`."""

from kvbench.papers.cli import cli, main
from kvbench.terminal.command import leave

__all__ = ["cli", "main"]

if __name__ == "__main__":
    leave(main())

"""`kvbench tables`: published tables, compared with runs; see `kvbench.papers.cli`."""

import sys

from kvbench.papers.cli import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    sys.exit(main())

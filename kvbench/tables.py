"""`python -m kvbench.tables`: the papers' tables, printed and beside our runs; see `kvbench.papers.cli`."""

import sys

from kvbench.papers.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbench.tables`: published tables, compared with runs; see `kvbench.papers.cli`."""

import sys

from kvbench.papers.cli import main

if __name__ == "__main__":
    sys.exit(main())

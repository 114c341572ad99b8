"""`python -m kvbench.bench`: see `kvbench.bench.cli`."""

import sys

from kvbench.console import share_cores

if __name__ == "__main__":
    share_cores()
    from kvbench.bench.cli import main

    sys.exit(main())

"""`python -m kvbench.bench`: see `kvbench.tools.bench.cli`."""

import sys

from kvbench.terminal.command import share_cores

if __name__ == "__main__":
    share_cores()
    from kvbench.tools.bench.cli import main

    sys.exit(main())

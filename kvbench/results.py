"""`python -m kvbench.results`: see `kvbench.report.command`."""

import sys

from kvbench.report.command import main

if __name__ == "__main__":
    sys.exit(main())

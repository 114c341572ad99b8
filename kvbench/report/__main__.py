"""`python -m kvbench.report DIR -o report.html`: see `kvbench.page`."""

import sys

from kvbench.page.command import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbench.sweep`: see `kvbench.sweeps.command`."""

import sys

from kvbench.sweeps.command import main

if __name__ == "__main__":
    sys.exit(main())

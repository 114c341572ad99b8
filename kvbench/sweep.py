"""`python -m kvbench.sweep`: see `kvbench.sweeps.status`."""

import sys

from kvbench.sweeps.status import main

if __name__ == "__main__":
    sys.exit(main())

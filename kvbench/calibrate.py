"""`python -m kvbench.calibrate`: see `kvbench.tools.calibrate`."""

import sys

from kvbench.tools.calibrate import main

if __name__ == "__main__":
    sys.exit(main())

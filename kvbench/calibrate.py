"""`kvbench calibrate`: see `kvbench.tools.calibrate`."""

import sys

from kvbench.tools.calibrate import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    sys.exit(main())

"""`kvbench diagnose`: see `kvbench.tools.diagnose`."""

import sys

from kvbench.tools.diagnose import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    sys.exit(main())

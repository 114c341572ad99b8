"""`kvbench score`: see `kvbench.tools.score`."""

import sys

from kvbench.tools.score import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":
    sys.exit(main())

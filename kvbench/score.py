"""`python -m kvbench.score`: see `kvbench.tools.score`."""

import sys

from kvbench.tools.score import main

if __name__ == "__main__":
    sys.exit(main())

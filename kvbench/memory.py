"""`python -m kvbench.memory`: see `kvbench.tools.predicted_bytes`."""

import sys

from kvbench.tools.predicted_bytes import main

if __name__ == "__main__":
    sys.exit(main())

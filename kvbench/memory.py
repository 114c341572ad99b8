"""`python -m kvbench.memory`: see `kvbench.tools.cache_bytes`."""

import sys

from kvbench.tools.cache_bytes import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbench.diagnose`: see `kvbench.tools.diagnose`."""

import sys

from kvbench.tools.diagnose import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbench`: one run; with `-m` a sweep. A plain Hydra application on the configurations of conf/."""

import sys

from kvbench.cli import main

if __name__ == "__main__":
    sys.exit(main())

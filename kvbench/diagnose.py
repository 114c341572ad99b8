"""`python -m kvbench.diagnose`: see `kvbench.tools.diagnose`."""

from kvbench.terminal.console import leave
from kvbench.tools.diagnose import main

if __name__ == "__main__":
    leave(main())

"""`python -m kvbench.score`: see `kvbench.tools.score`."""

from kvbench.terminal.console import leave
from kvbench.tools.score import main

if __name__ == "__main__":
    leave(main())

"""`python -m kvbench.memory`: see `kvbench.tools.cache_bytes`."""

from kvbench.terminal.console import leave
from kvbench.tools.cache_bytes import main

if __name__ == "__main__":
    leave(main())

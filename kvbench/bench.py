"""`python -m kvbench.bench`: see `kvbench.tools.bench.cli`."""

from kvbench.terminal.console import leave, share_cores

if __name__ == "__main__":
    share_cores()
    from kvbench.tools.bench.cli import main

    leave(main())

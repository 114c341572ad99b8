"""`kvbench tasks`: see `kvbench.tools.catalog`."""

import sys

from kvbench.terminal.command import program
from kvbench.tools.catalog import listing

cli = listing("task", "tasks", "All tasks, or the idea and the fields of one: kvbench tasks niah.")
main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

"""`kvbench tasks`: see `kvbench.tools.catalog`."""

from kvbench.terminal.command import leave, program
from kvbench.tools.catalog import listing

cli = listing("task", "tasks", "All tasks, or the idea and the fields of one: kvbench tasks niah.")
main = program(cli)

if __name__ == "__main__":
    leave(main())

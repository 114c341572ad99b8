"""`kvbench models`: see `kvbench.tools.catalog`."""

from kvbench.terminal.command import leave, program
from kvbench.tools.catalog import listing

cli = listing("model", "models", "All named models, or the fields of one: kvbench models smollm2.")
main = program(cli)

if __name__ == "__main__":
    leave(main())

"""`kvbench models`: see `kvbench.tools.catalog`."""

import sys

from kvbench.terminal.command import program
from kvbench.tools.catalog import listing

cli = listing("model", "models", "All named models, or the fields of one: kvbench models smollm2.")
main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

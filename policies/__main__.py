"""`kvbench policies`: see `kvbench.tools.catalog`."""

from kvbench.terminal.command import leave, program
from kvbench.tools.catalog import listing

cli = listing(
    "policy",
    "policies",
    "All policies, or the idea, equation, fields, paper and requirements of one: kvbench policies snapkv.",
)
main = program(cli)

if __name__ == "__main__":
    leave(main())

"""`kvbench results`: tables and checks of finished runs."""

import sys

from kvbench.terminal.command import Commands, program

cli = Commands(
    "results",
    {
        "collect": (
            "kvbench.report.command:collect",
            "one table of all runs below a folder: .csv, .parquet, .md, .tex",
        ),
        "check": ("kvbench.tools.check_results:check", "check that the numbers of runs agree with their samples"),
    },
    "Tables and checks of finished runs.",
)
main = program(cli)

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbench.results`: see `kvbench.report.command`; `check` is in `kvbench.tools.check_results`."""

import sys

if sys.argv[1:2] == ["check"]:
    from kvbench.tools.check_results import main
else:
    from kvbench.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:] if sys.argv[1:2] == ["check"] else None))

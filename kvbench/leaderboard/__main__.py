"""`python -m kvbench.leaderboard`: see `kvbench.leaderboard.command`."""

import sys

from kvbench.leaderboard.command import main

if __name__ == "__main__":
    sys.exit(main())

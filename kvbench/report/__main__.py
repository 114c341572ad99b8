"""`python -m kvbench.report DIR -o report.html`: see `kvbench.page`."""

import os
import sys

from kvbench.page.command import main

os.environ["HF_HUB_OFFLINE"] = "1"  # a report takes tokenizers and tasks from this machine, and fetches nothing

if __name__ == "__main__":
    sys.exit(main())

"""`kvbench report DIR -o report.html`: see `kvbench.report.html`."""

import os

from kvbench.report.html.report import cli, main
from kvbench.terminal.command import leave

__all__ = ["cli", "main"]
os.environ["HF_HUB_OFFLINE"] = "1"  # a report uses only local tokenizers and task data

if __name__ == "__main__":
    leave(main())

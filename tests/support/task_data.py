"""One folder with invented data for every task that reads some, in the official formats."""

from __future__ import annotations

from pathlib import Path

import longbench_rows


def write(folder: Path) -> Path:
    """The folder, filled."""
    longbench_rows.write(folder)
    return folder

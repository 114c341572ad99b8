"""One folder with invented data for every task that reads some, in the official formats."""

from __future__ import annotations

from pathlib import Path

import longbench_rows
import needlebench_files
import ruler_files


def write(folder: Path) -> Path:
    """The folder, filled."""
    longbench_rows.write(folder)
    needlebench_files.write(folder)
    return ruler_files.write(folder)

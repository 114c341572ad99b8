"""One folder with invented data for every task that reads some, in the official formats."""

from __future__ import annotations

import json
from pathlib import Path

import longbench_rows
import needlebench_files
import ruler_files


def write(folder: Path) -> Path:
    """The folder, filled."""
    longbench_rows.write(folder)
    needlebench_files.write(folder)
    asked = {"context": "The mill is red. ", "question": "What is red?", "answers": ["The mill"], "max_new_tokens": 4}
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    return ruler_files.write(folder)

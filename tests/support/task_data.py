"""One folder with invented data for every task that reads some, in the official formats; and what runs keep."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import longbench_rows
import needlebench_files
import pytest
import ruler_files
import yaml

from kvbench.config.compose import merge, read
from kvbench.config.parts import build as built

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
"""Results of official code, recorded outside this repository."""


def recorded(name: str) -> list[dict[str, Any]]:
    """The recorded official results of a file; the test is skipped where they are not at hand."""
    path = GOLDEN / name
    if not path.is_file():
        pytest.skip(f"the recorded official results are not at {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(folder: Path) -> Path:
    """The folder, filled."""
    longbench_rows.write(folder)
    needlebench_files.write(folder)
    asked = {"context": "The mill is red. ", "question": "What is red?", "answers": ["The mill"], "max_new_tokens": 4}
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    return ruler_files.write(folder)


def build(name: str, *overrides: str) -> Any:
    """The task of a preset; overrides: such as task.length=512."""
    config: dict[str, Any] = {"task": read("task", name)}
    for key, _, text in (word.partition("=") for word in overrides):
        given: Any = yaml.safe_load(text)
        for field_name in reversed(key.split(".")):
            given = {field_name: given}
        merge(config, given)
    return built(config["task"])


@dataclass(frozen=True)
class Answer:
    """What a run keeps of an example."""

    score: float | None
    metadata: dict[str, Any] = field(default_factory=dict)
    references: Sequence[str] = ()
    output: str | None = "x"
    measures: Any = None

"""Examples that failed are computed again, and nothing else is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_cells import small_cell

from kvbench.engine.run import run_cells
from kvbench.engine.watch import Nobody
from kvbench.identity.cell import Cell
from kvbench.records.retries import drop_failed
from kvbench.records.sample import Sample
from kvbench.records.shards import on_disk


class Killed(BaseException):
    """As kill -9, but for what Python does on the way out."""


class Computed(Nobody):
    """Counts what is on disk when it begins, and what comes."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def started(self, cell: Cell, done: Any, total: int) -> None:
        self.told.append(len(done))

    def finished(self, cell: Cell, sample: Sample) -> None:
        self.told.append(sample.index)


def compute(cell: Cell) -> list[int]:
    watch = Computed()
    (ending,) = run_cells([cell], watch)
    assert ending.error is None
    return watch.told


def lines(path: Path) -> list[dict[str, Any]]:
    """The samples of a file, without seconds."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in found]


def failing(path: Path, errors: dict[int, str]) -> None:
    """Let examples of a file have failed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["index"] in errors:
            row |= {"output": None, "score": None, "error": errors[row["index"]]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("killed", [False, True])
def test_examples_that_ran_out_of_memory_are_computed_again_and_others_that_failed_where_it_is_asked_for(
    tmp_path: Path, tiny_model: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = small_cell(tmp_path, tiny_model, "streamingllm", 40, "engine.rows=1")
    path = cell.folder / "samples.jsonl"
    compute(cell)
    before = lines(path)
    assert len(before) == 3
    failing(path, {0: "OutOfMemoryError: 2 GiB", 2: "BudgetError: broken"})
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                drop_failed(cell.folder)
    assert drop_failed(cell.folder)
    assert on_disk(cell.folder) == {1, 2}
    assert not (cell.folder / "metrics.json").exists()
    assert compute(cell) == [0, 0, 1, 2]
    assert lines(path)[:2] == before[:2]
    assert lines(path)[2]["error"] == "BudgetError: broken"
    assert not drop_failed(cell.folder)
    assert drop_failed(cell.folder, every=True)
    assert compute(cell) == [2, 2]
    assert lines(path) == before
    assert not list(cell.folder.glob("shard-*"))

"""Prompts beside those of the official code, which were recorded outside this repository."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from char_tokenizer import CharTokenizer
from task_data import GOLDEN, recorded

from kvbench.tasks.needlebench.grids import Grid
from kvbench.tasks.needlebench.task import NeedleBench, Point


@dataclass(frozen=True)
class OneBuffer(Grid):
    """The grids of the recorded prompts: one buffer for everything."""

    def buffer(self, kind: str, language: str) -> int:
        return self.english[0]


@dataclass(frozen=True, kw_only=True)
class Recorded(NeedleBench):
    """The task with the arguments of one recorded prompt."""

    arguments: tuple[tuple[str, Any], ...]
    kind: str
    repeat: int

    @property
    def grid(self) -> Grid:
        given = dict(self.arguments)
        return OneBuffer((given["length"],), tuple(given.get("depths", ())), (given["length_buffer"],) * 3)

    def points(self) -> Iterator[Point]:
        given = dict(self.arguments)
        needles = given.get("num_needles", len(given.get("depths", (1,))))
        language = {"English": "en", "Chinese": "zh"}[given["language"]]
        yield Point(self.kind, language, given["length"], given.get("depth"), self.repeat, needles)


def test_official_prompts_come_out_byte_for_byte(tmp_path: Path) -> None:
    wanted = recorded("needlebench_prompts.jsonl")
    assert len(wanted) == 76
    inputs = json.loads((GOLDEN / "needlebench_prompt_inputs.json").read_text(encoding="utf-8"))
    for name, content in inputs["files"].items():
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in content)
        (tmp_path / name).write_text(json.dumps(content) if name.endswith(".json") else lines, encoding="utf-8")
    for row in wanted:
        given = row["arguments"]
        # The official needle set comes from the unseeded global stream; it was seeded with the length for the record.
        assert row["random_seed_before_load"] == given["length"]
        assert given.get("diff", 10) == 10
        assert given["guide"]
        task = Recorded(
            arguments=tuple(given.items()),
            kind=row["task"],
            repeat=row["repeat"],
            counted_in="model",
            data_dir=str(tmp_path),
        )
        example = next(task.examples(CharTokenizer(), seed=0))
        assert example.prompt == row["prompt"]
        assert example.references == (row["answer"],)

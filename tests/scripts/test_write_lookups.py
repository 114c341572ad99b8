"""The pocket model's rows in LongBench's format: made by their script, asked and scored as LongBench's own."""

import json
import sys
from pathlib import Path

import pytest

from kvbench.config.tree import build, read
from kvbench.tasks.longbench.task import LongBench

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import write_lookups  # noqa: E402 - found in scripts


@pytest.fixture(scope="module")
def lookups() -> LongBench:
    task = build(read("task", "longbench/lookups"))
    assert isinstance(task, LongBench)
    return task


def test_the_rows_are_those_that_the_script_writes() -> None:
    assert [json.loads(line) for line in write_lookups.PATH.read_text().splitlines()] == list(write_lookups.rows())


def test_the_answer_stands_once_in_the_context_at_every_depth() -> None:
    places = []
    for row in map(json.loads, write_lookups.PATH.read_text().splitlines()):
        (answer,) = row["answers"]
        assert row["context"].count(answer) == 1
        assert answer not in row["input"]
        places.append(row["context"].index(answer) / len(row["context"]))
    assert places == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9] * 2, abs=0.02)


def test_a_row_is_asked_and_scored_as_longbenchs_triviaqa(lookups: LongBench) -> None:
    """F1 of 'it is 1121537 sir' with '1121537': precision 1/4, recall 1, so 2/5; what follows a new line is cut off."""
    (one,) = lookups.examples(tokenizer=None, seed=0, limit=1)  # type: ignore[arg-type] - its prompts need none
    assert one.prompt.startswith("Answer the question based on the given passage. Only give me the answer")
    assert one.prompt.endswith("\nAnswer: The secret number of bulky-maid is")
    assert one.max_new_tokens == 32
    assert [lookups.score(said, one) for said in ("1121537", "it is 1121537 sir\n9", "1121538")] == [1, 0.4, 0]

"""The pocket model's rows in LongBench's format: made by their script, asked and scored as LongBench's own."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import write_lookups  # noqa: E402 - found in scripts


def test_the_rows_are_those_that_the_script_writes() -> None:
    assert [json.loads(line) for line in write_lookups.PATH.read_text().splitlines()] == list(write_lookups.rows())


def test_the_answer_stands_once_in_the_context_at_every_depth() -> None:
    places = []
    for row in map(json.loads, write_lookups.PATH.read_text().splitlines()):
        (answer,) = row["answers"]
        assert row["context"].count(answer) == 1
        assert answer not in row["input"]
        places.append(row["context"].index(answer) / len(row["context"]))
    assert sorted(places[:5]) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.02)
    assert sorted(places[5:]) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.02)

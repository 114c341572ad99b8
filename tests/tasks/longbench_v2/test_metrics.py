"""LongBench v2's scores by hand; the recorded official scores are in tests/kvbench/test_score.py."""

from typing import Any

import pytest

from kvbench.tasks.longbench_v2.predictions import score_predictions

RIGHT, WRONG = "The correct answer is (A)", "The correct answer is (B)"
CORPUS: dict[str, Any] = {
    "prediction": [RIGHT, WRONG, RIGHT, ""],
    "references": [["A"]] * 4,
    "difficulty": ["easy", "easy", "hard", "hard"],
    "length": ["short", "long", "long", "long"],
}


def test_kvpress_accepts_the_right_letter_after_a_wrong_one() -> None:
    line = {"prediction": f"{WRONG}. No: {RIGHT}.", "references": ["A"]}
    assert score_predictions(line) == {"score": 0.0}
    assert score_predictions(line, "kvpress") == {"score": 1.0}


def test_the_authors_leave_empty_outputs_out_and_print_percent() -> None:
    found = score_predictions(CORPUS)
    assert found["score"] == pytest.approx(2 / 3)
    assert found["scores"] == {"overall": 66.7, "easy": 50.0, "hard": 100.0, "short": 100.0, "long": 50.0}
    assert score_predictions({**CORPUS, "prediction": [""] * 4})["score"] is None

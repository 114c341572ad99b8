"""InfiniteBench's rules by hand; the recorded official scores are in tests/kvbench/test_score.py."""

import pytest

from kvbench.tasks.infinitebench.predictions import score_predictions


def line(task: str, prediction: str, references: object) -> dict[str, object]:
    return {"task": task, "prediction": prediction, "references": references}


def test_the_letter_of_the_answer_and_not_of_the_word_answer_is_the_sound_choice() -> None:
    asked = line("longbook_choice_eng", "Answer: C", ["Working in the dairy", "C"])
    assert score_predictions(asked) == {"score": 0.0, "score_sound": 1.0}
    assert score_predictions(asked, "kvpress")["score"] == 1.0


def test_a_negative_value_counts_in_the_sound_score_alone() -> None:
    asked = line("math_calc", "[-3, 5, 8]", [-3, 5, 9])
    assert score_predictions(asked) == {"score": 0.0, "score_sound": pytest.approx(2 / 3)}


def test_a_decimal_that_the_official_code_cannot_read_has_no_score_but_a_reason() -> None:
    found = score_predictions(line("math_find", "It is 42.0.", [42]))
    assert (found["score"], found["score_sound"]) == (None, 1.0)
    assert str(found["error"]).startswith("the official scorer raises ValueError")

"""Boxed answers by hand; the recorded official scores are in tests/kvbench/test_score.py."""

from __future__ import annotations

from kvbench.tasks.math.predictions import score_predictions


def line(task: str, prediction: object, references: object) -> dict[str, object]:
    return {"task": task, "prediction": prediction, "references": references}


def test_nested_braces_are_read_by_the_sound_score_alone() -> None:
    found = score_predictions(line("math500", r"so \boxed{\frac{3}{8}}.", [r"\frac{3}{8}"]))
    assert found == {"score": 0.0, "score_sound": 1.0, "answered": True, "extracted": r"\frac{3"}


def test_aime_reads_the_last_box_and_math500_the_first() -> None:
    output = r"\boxed{117}, no: \boxed{204}"
    assert score_predictions(line("aime25", output, ["204"]))["score"] == 1.0
    assert score_predictions(line("math500", output, ["204"]))["score"] == 0.0


def test_a_list_has_the_mean_and_says_how_many_have_a_box() -> None:
    found = score_predictions(line("aime25", ["204", r"\boxed{1}", r"\boxed{ 204 }", ""], [["204"]] * 4))
    assert found["scores"] == {"correct": 1.0, "answered": 2, "total": 4, "accuracy": 0.25}
    assert (found["score"], found["score_sound"]) == (0.25, 0.25)

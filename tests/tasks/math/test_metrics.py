"""Boxed answers by hand; the recorded official scores are in tests/kvbench/test_score.py."""

import pytest

from kvbench.tasks.math.predictions import score_predictions, sound


def line(task: str, prediction: object, references: object) -> dict[str, object]:
    return {"task": task, "prediction": prediction, "references": references}


def test_nested_braces_are_read_by_the_sound_score_alone() -> None:
    found = score_predictions(line("math500", r"so \boxed{\frac{3}{8}}.", [r"\frac{3}{8}"]))
    assert found == {"score": 0.0, "score_sound": 1.0, "answered": True, "extracted": r"\frac{3"}


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{\frac12}", "0.5", True),
        (r"\boxed{\text{Evelyn}}", "Evelyn", True),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", True),
        (r"\boxed {3}", "3", True),
        (r"\boxed{\$36}", "36", True),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{2}, no: \boxed{3}", "3", True),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
        (r"\boxed{Angela}", r"\text{Evelyn}", False),
        (r"\boxed{3}, no: \boxed{2}", "3", False),
        ("3", "3", False),
        (r"\boxed{", "3", False),
        (r"\boxed{20", "20", False),
        (r"\boxed{20}, or \boxed{20", "20", False),
        (r"\fbox{20}", "20", True),
        (r"\boxed{\text{saw}}", r"\text{was}", False),
        (r"\boxed{saw}", r"\text{was}", False),
        (r"\boxed{saw}", "was", False),
        (r"\boxed{\text{no solution}}", "No solution", True),
        (r"\boxed{C}", r"\text{(C)}", True),
        (r"\boxed{\text{(D)}}", r"\text{(C)}", False),
        (r"\boxed{ba}", "ab", True),
        (r"\boxed{1\,000}", "1000", True),
        (r"\boxed{10\ 000}", "10000", True),
        (r"\boxed{1~000\;000}", r"1{,}000{,}000", True),
        (r"\boxed{10,\!080}", "10080", True),
        (r"\boxed{(1, 200)}", "1200", False),
        (r"\boxed{2\ \text{cm}}", "2", True),
        (r"\boxed{2~\mathrm{cm}^2}", r"2\mbox{ cm}^2", True),
        (r"\boxed{3\ \text{cm}}", "2", False),
        (r"\boxed{3\mathrm{i}}", "3i", True),
        (r"\boxed{3\mathrm{i}}", "3", False),
        (r"\boxed{50}", r"50\%", True),
        (r"\boxed{30°}", r"30^\circ", True),
        (r"\boxed{}", "3", False),
    ],
)
def test_the_sound_score_compares_values(output: str, answer: str, right: bool) -> None:
    assert sound(output, answer) == right


def test_aime_reads_the_last_box_and_math500_the_first() -> None:
    output = r"\boxed{117}, no: \boxed{204}"
    assert score_predictions(line("aime25", output, ["204"]))["score"] == 1.0
    assert score_predictions(line("math500", output, ["204"]))["score"] == 0.0

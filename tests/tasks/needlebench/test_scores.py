"""NeedleBench's scores and averages by hand."""

import pytest

from kvbench.tasks.needlebench import scores
from kvbench.tasks.needlebench.summary import cells_of_results, overall


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("the Crown", 100.0),
        ("the crown", 20 * 7 / 16),  # "thecrown" and "Nellhidthe.Crown": see below
        ("", 0.0),
        ("Nell hid the . ", 20 * 11 / 16),
    ],
)
def test_single_retrieval_is_the_keyword_or_up_to_20_for_the_wording(prediction: str, expected: float) -> None:
    # without white space the needle is "Nellhidthe.Crown", 16 characters; the distances are 9, 16 and 5
    assert scores.single_retrieval(prediction, "\nNell hid the. Crown\n*Crown") == pytest.approx(expected)
    assert scores.single_retrieval(prediction, "\nNell hid the. Crown\n*Crown", v2=True) == 100 * (expected == 100)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("\\boxed{Ada Vance}", 100.0),
        ("\\boxed{Bob} or rather \\boxed{\\text{Ada Vance}}", 100.0),
        ('\\boxed{{"Ada~Vance"}}', 100.0),
        ("\\boxed{Ada}", 0.0),
        ("Ada Vance", 0.0),
        ("\\boxed{Ada Vance", 0.0),
    ],
)
def test_v2_takes_the_last_box(prediction: str, score: float) -> None:
    assert scores.boxed_answer(prediction, "Ada Vance") == score


def results(cell: float, reasoning: float) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for language in ("en", "zh"):
        found[f"Length1000_parallel_{language}_4k"] = {"Depth0": 50.0, "Depth10": 70.0, "average_score": 0.0}
        for depth in (0, 10):
            found[f"Length1000Depth{depth}_origin_{language}_4k"] = {"score": cell}
            for needles in (2, 3, 4, 5):
                found[f"Length1000Depth{depth}_{needles}needle_{language}_4k"] = {"score": reasoning}
    return found


def test_the_overall_score_weighs_single_retrieval_most() -> None:
    got = overall(cells_of_results(results(cell=100.0, reasoning=20.0)))
    assert got == pytest.approx(
        {
            "single_retrieval": 100.0,
            "multi_retrieval": 60.0,
            "multi_reasoning": 20.0,
            "overall": 0.4 * 100 + 0.3 * 60 + 0.3 * 20,
            "overall_equal_weights": 60.0,
        }
    )

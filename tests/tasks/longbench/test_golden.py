"""Our scores beside the recorded official ones; those of whole sets are in tests/kvbench/test_score.py."""

import pytest
from task_data import recorded

from kvbench.tasks.longbench.metrics import score
from kvbench.tasks.longbench.subsets import SUBSETS
from kvbench.tasks.longbench.summary import percent


def test_every_single_prediction_scores_as_in_the_official_code() -> None:
    cases = recorded("longbench_scores.jsonl")
    assert {case["dataset"] for case in cases} == set(SUBSETS)
    for case in cases:
        got = score(SUBSETS[case["dataset"]], case["prediction"], case["answers"], case["all_classes"], official=True)
        assert 100 * got == pytest.approx(case["score_unrounded"], abs=1e-9), case["id"]
        assert percent([got]) == pytest.approx(case["score"], abs=1e-6), case["id"]


def test_the_true_rouge_differs_only_where_the_official_code_overflows_its_stack() -> None:
    for case in recorded("longbench_scores.jsonl"):
        asked = (SUBSETS[case["dataset"]], case["prediction"], case["answers"], case["all_classes"])
        assert (score(*asked) == score(*asked, official=True)) == (case["tag"] != "rouge_recursion_limit"), case["id"]

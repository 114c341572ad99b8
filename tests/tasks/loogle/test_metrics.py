"""LooGLE's scores by hand, and all metrics of the recorded official ones."""

import json
from typing import Any

import pytest
from task_data import recorded

from kvbench.tasks.loogle.metrics import CLOZE, cloze, read_dict, similarities
from kvbench.tasks.loogle.predictions import score_predictions

BLANKS = json.dumps({"<mask-0>": "Ada Byron", "<mask-1>": "Turin"})


def line(prediction: object, references: object = (BLANKS,), task: str = CLOZE) -> dict[str, Any]:
    return {"task": task, "prediction": prediction, "references": [*references] if references else references}


def test_every_recorded_metric_is_the_official_one() -> None:
    cases = recorded("loogle_scores.jsonl")
    for case in (one for one in cases if "kind" not in one):
        pair = case["prediction"], case["references"][0]
        got: dict[str, Any] = cloze(*pair, "kvpress") if case["task"] == CLOZE else similarities(*pair, "kvpress")
        low, high = case["scores"].pop("meteor_no_synonyms", (0.0, 0.0))  # over a few hash seeds
        assert low - 0.02 <= got.get("meteor_no_synonyms", 0.0) <= high + 0.02, case["id"]
        for name, value in case["scores"].items():
            assert got[name] == (tuple(value) if isinstance(value, list) else pytest.approx(value)), case["id"]
    for case in (one for one in cases if "kind" in one):
        got = score_predictions({k: v for k, v in case.items() if k != "score"}, "kvpress")["scores"]
        assert got == case["scores"], case["id"]


def test_the_authors_have_no_score_for_an_answer_of_full_stops() -> None:
    asked = line("...", ["It rained."], "longdep_qa")
    assert score_predictions(asked)["error"] == "the official scorer raises ValueError: Hypothesis is empty."
    assert score_predictions(asked, "kvpress")["score"] == 0.0


def test_a_broken_output_is_one_blank_for_kvpress_and_all_of_them_for_the_authors() -> None:
    files = line([json.dumps({"<mask-0>": "Ada Byron", "<mask-1>": "Rome"}), "Turin"], [[BLANKS]] * 2)
    kvpress, found = score_predictions(files, "kvpress"), score_predictions(files)
    assert kvpress["scores"] == {"exact_match": 0.3333, "partial_match": 0.25}
    assert found == {**kvpress, "score_authors": 0.25, "scores_authors": {"exact_match": 0.25, "partial_match": 0.25}}


def test_no_text_of_a_model_is_evaluated() -> None:
    assert read_dict("dict(a='b')") == {"a": "b"}
    for text in (
        "dict(a=open('x', 'w'))",
        "{'a': __import__('os').getcwd()}",
        "[1]",
        "{",
        "(" * 10_000,
        "dict(**{1: 2})",
    ):
        assert not read_dict(text), text

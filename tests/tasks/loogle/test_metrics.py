"""LooGLE's scores by hand, and all metrics of the recorded official ones."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.tasks.loogle.metrics import CLOZE, cloze, meteor, read_dict, similarities, sound_cloze
from kvbench.tasks.loogle.predictions import score_predictions

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "loogle_scores.jsonl"
BLANKS = json.dumps({"<mask-0>": "Ada Byron", "<mask-1>": "Turin"})


def line(prediction: object, references: object = (BLANKS,), task: str = CLOZE) -> dict[str, Any]:
    return {"task": task, "prediction": prediction, "references": [*references] if references else references}


def test_every_recorded_metric_is_the_official_one() -> None:
    if not GOLDEN.is_file():
        pytest.skip(f"the recorded official results are not at {GOLDEN}")
    cases = [json.loads(one) for one in GOLDEN.read_text(encoding="utf-8").splitlines()]
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


def test_recall_of_rouge_is_over_distinct_words_of_the_answer() -> None:
    found = similarities("the mill the mill is old", "the old mill. the mill", "authors")
    assert (found["rouge-1"], found["rouge-2"]) == (1.0, pytest.approx(2 / 4))  # the-old, old-mill, mill-the, the-mill
    assert found["rouge-l"] == pytest.approx(2 / 3)


def test_the_authors_have_no_score_for_an_answer_of_full_stops() -> None:
    asked = line("...", ["It rained."], "longdep_qa")
    assert score_predictions(asked)["error"] == "the official scorer raises ValueError: Hypothesis is empty."
    assert score_predictions(asked, "kvpress")["score"] == 0.0


def test_meteor_does_not_depend_on_the_order_of_hashes() -> None:
    code = "from kvbench.tasks.loogle.metrics import meteor; print(meteor('a b c d e f', 'c d a x b f e'))"
    said = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"})
    assert ast.literal_eval(said.decode()) == meteor("a b c d e f", "c d a x b f e")  # with the hashes of this process


def test_a_broken_output_is_one_blank_for_kvpress_and_all_of_them_for_the_authors() -> None:
    files = line([json.dumps({"<mask-0>": "Ada Byron", "<mask-1>": "Rome"}), "Turin"], [[BLANKS]] * 2)
    kvpress, found = score_predictions(files, "kvpress"), score_predictions(files)
    assert kvpress["scores"] == {"exact_match": 0.3333, "partial_match": 0.25}
    assert found == {**kvpress, "score_authors": 0.25, "scores_authors": {"exact_match": 0.25, "partial_match": 0.25}}


def test_the_object_is_found_in_other_text_by_the_sound_score_alone() -> None:
    fenced = f"Here:\n```json\n{BLANKS}\n```"
    found = score_predictions(line(fenced))
    assert (found["score"], found["score_sound"]) == (0.0, 1.0)
    assert sound_cloze("{'<mask-1>': 7}", BLANKS) == {"exact_match": (0, 2), "partial_match": (0, 2)}


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

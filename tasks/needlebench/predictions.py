"""The official scores of recorded predictions on NeedleBench, and OpenCompass's averages of its results table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean

from kvbench.tasks.needlebench import scores
from kvbench.tasks.needlebench.grids import KINDS
from kvbench.tasks.needlebench.summary import cells_of_results, overall
from kvbench.tasks.predictions import Line, one_of, texts, wanted_texts

FIELDS = (
    "task, predictions and references (the official gold strings); or results, OpenCompass's table of "
    "cells, which also gives the averages of the three tasks"
)
FLAGS = {"v2": "score as the version of June 2025: no points for wording, boxed answers, equal weights"}


def score_predictions(line: Line, v2: bool = False) -> Line:
    """`score` from 0 to 100, unrounded: of task, predictions and references, or the overall score of `results`.

    results: OpenCompass's table of cells; the averages of the three tasks are returned as well.
    Raises ValueError, naming the field, if the line has another format.
    """
    if "results" in line:
        return _overall(line["results"], v2)
    task = one_of(line, "task", KINDS)
    predictions = texts(line, "predictions")
    golds = wanted_texts(line, "references")
    if len(golds) != len(predictions):
        raise ValueError(f"references has {len(golds)} entries for {len(predictions)} predictions")
    if task == "multi_retrieval":
        return {"score": scores.mean_over_depths(scores.multi_retrieval(predictions, golds))}
    rate: Callable[[str, str], float] = scores.multi_reasoning
    if task == "single_retrieval":
        rate = partial(scores.single_retrieval, v2=v2)
    elif v2:
        rate = scores.boxed_answer
    return {"score": fmean(rate(prediction, gold) for prediction, gold in zip(predictions, golds, strict=True))}


def _overall(results: object, v2: bool) -> Line:
    if not isinstance(results, dict) or not all(isinstance(values, dict) for values in results.values()):
        raise ValueError("results must be OpenCompass's table, an object of objects")
    found = overall(cells_of_results(results))
    return {**found, "score": found["overall_equal_weights" if v2 else "overall"]}

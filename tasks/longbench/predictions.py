"""The official scores of recorded predictions on LongBench."""

from __future__ import annotations

from functools import partial

from kvbench.tasks.longbench.metrics import score
from kvbench.tasks.longbench.subsets import EXTENDED, SUBSETS
from kvbench.tasks.longbench.summary import by_bin, percent
from kvbench.tasks.predictions import Line, nested, numbers, text, texts, wanted_texts

FIELDS = (
    "dataset, prediction and answers; or dataset, predictions, answers of each and, for LongBench-E (mode "
    "e, or a dataset ending in _e), lengths; and all_classes for classification"
)
FLAGS = {"true_rouge": "the true ROUGE even if the official code overflows Python's stack and scores 0"}


def score_predictions(line: Line, true_rouge: bool = False) -> Line:
    """`score` in percent, rounded to two decimals; LongBench-E (mode "e", or a name ending in _e) has one per bin.

    One prediction: dataset, prediction, answers. A subset: dataset, predictions, answers of each, and for mode "e"
    lengths. Classification needs all_classes. true_rouge: the true ROUGE even if the official code overflows Python's
    stack and scores 0. Raises ValueError, naming the field, if the line has another format.
    """
    dataset, mode = _dataset(line)
    subset = SUBSETS[dataset]
    classes = None if line.get("all_classes") is None else texts(line, "all_classes")
    rate = partial(score, subset, all_classes=classes, official=not true_rouge)
    if "predictions" not in line:
        return {"score": percent([rate(text(line, "prediction"), wanted_texts(line, "answers"))])}
    predictions = texts(line, "predictions")
    scores = [rate(*pair) for pair in zip(predictions, nested(line, "answers", len(predictions)), strict=True)]
    if mode == "main":
        return {"score": percent(scores)}
    return {"score": by_bin(scores, numbers(line, "lengths", len(predictions)))}


def _dataset(line: Line) -> tuple[str, str]:
    """(subset, mode "main" or "e")."""
    name = text(line, "dataset")
    subset = name.removesuffix("_e")
    mode = line.get("mode", "e" if subset != name else "main")
    if subset not in SUBSETS:
        raise ValueError(f"dataset={name!r} is not known, choose one of {', '.join(SUBSETS)}")
    if mode not in ("main", "e"):
        raise ValueError(f"mode={mode!r} is not known, choose 'main' or 'e'")
    if mode == "e" and subset not in EXTENDED:
        raise ValueError(f"dataset={name!r} is not part of LongBench-E, choose one of {', '.join(EXTENDED)}")
    return subset, mode

"""The scores of recorded predictions on AIME 2025 and MATH-500, whose only scorer with a name is kvpress's."""

from __future__ import annotations

from statistics import fmean

from kvbench.tasks.math.metrics import TASKS, answered, boxed, score, sound
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, nested, one_of, text, texts

FIELDS = "task, prediction and references (one answer); or a list of predictions and the references of each"


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score`, 0 or 1, what was read as the answer, and `score_sound` by balanced braces; of lists the means.

    protocol: both are one, the benchmarks' authors published no scorer of such outputs.
    Raises ValueError, naming the field, where the line is of another form.
    """
    task = one_of(line, "task", TASKS)
    if not isinstance(line.get("prediction"), list):
        prediction, (answer, *_) = text(line, "prediction"), texts(line, "references")
        found: Line = {"score": score(task, prediction, answer), "score_sound": sound(prediction, answer)}
        return {**found, "answered": answered(prediction), "extracted": boxed(task, prediction)}
    predictions = texts(line, "prediction")
    answers = [wanted[0] for wanted in nested(line, "references", len(predictions))]
    pairs = list(zip(predictions, answers, strict=True))
    scores = [score(task, *pair) for pair in pairs]
    counts = {"correct": sum(scores), "answered": sum(map(answered, predictions)), "total": len(scores)}
    return {
        "score": fmean(scores),
        "score_sound": fmean(sound(*pair) for pair in pairs),
        "scores": {**counts, "accuracy": fmean(scores)},
    }

"""The official scores of recorded predictions on RULER."""

from __future__ import annotations

from kvbench.tasks.predictions import Line, nested, one_of, texts
from kvbench.tasks.ruler.protocol import PROTOCOLS
from kvbench.tasks.summary import percent

FIELDS = "task, predictions and the references of each"


def score_predictions(line: Line) -> Line:
    """`score` in percent, rounded to two decimals, from task, predictions and the references of each.

    Raises ValueError, naming the field, where the line is of another form.
    """
    protocol = PROTOCOLS[one_of(line, "task", tuple(PROTOCOLS))]
    predictions = texts(line, "predictions")
    pairs = zip(predictions, nested(line, "references", len(predictions)), strict=True)
    return {"score": percent([protocol.score(prediction, tuple(wanted)) for prediction, wanted in pairs])}

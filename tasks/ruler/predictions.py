"""The protocols of RULER's 13 tasks, and the official scores of recorded predictions.

Source: NVIDIA/RULER at c3f5e3b, scripts/synthetic.yaml, scripts/eval/synthetic/constants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.tasks.predictions import Line, nested, one_of, texts
from kvbench.tasks.ruler.base import clean_up
from kvbench.tasks.scores import contains, contains_any, percent

FIELDS = "task, predictions and the references of each"


@dataclass(frozen=True)
class Protocol:
    """Settings of one task. match: score of a cleaned output and the references, 0 to 1."""

    max_new_tokens: int
    template: str
    match: Callable[[str, tuple[str, ...]], float] = contains

    def score(self, output: str, references: tuple[str, ...]) -> float:
        """Score of one raw output."""
        return self.match(clean_up(output), references)


_NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
PROTOCOLS: dict[str, Protocol] = {
    **{f"niah_{name}": Protocol(128, "niah") for name in _NEEDLES},
    "vt": Protocol(30, "variable_tracking"),
    "cwe": Protocol(120, "common_words"),
    "fwe": Protocol(50, "frequent_words"),
    "qa_1": Protocol(32, "qa", contains_any),
    "qa_2": Protocol(32, "qa", contains_any),
}


def score_predictions(line: Line) -> Line:
    """`score` in percent, rounded to two decimals, from task, predictions and the references of each.

    Raises ValueError, naming the field, if the line has another format.
    """
    protocol = PROTOCOLS[one_of(line, "task", tuple(PROTOCOLS))]
    predictions = texts(line, "predictions")
    pairs = zip(predictions, nested(line, "references", len(predictions)), strict=True)
    return {"score": percent([protocol.score(prediction, tuple(wanted)) for prediction, wanted in pairs])}

"""LongBench v2's score of one output, and its official percentages.

Sources: THUDM/LongBench at 2e00731, pred.py and result.py; NVIDIA/kvpress at 8bb29b9,
evaluation/benchmarks/longbenchv2/calculate_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvbench.tasks.context_question.metrics import correct_choice
from kvbench.tasks.task import Scored

GROUPS = ("easy", "hard", "short", "medium", "long")


def anywhere(output: str, references: tuple[str, ...]) -> float:
    """1 if the sentence with the right letter, in parentheses or not, occurs anywhere; asterisks are ignored."""
    plain, sentence = output.replace("*", ""), "The correct answer is "
    return float(any(sentence + form in plain for one in references for form in (f"({one})", one)))


RULES = {"authors": correct_choice, "kvpress": anywhere}
"""By protocol. The authors use the first such sentence, and prefer the form with parentheses."""


def by_group(scores: Sequence[float], difficulty: Sequence[str], length: Sequence[str]) -> dict[str, float]:
    """Means of all, of each difficulty and of each length that occurs."""
    found = {"overall": fmean(scores)}
    for group in GROUPS:
        members = [score for score, *of in zip(scores, difficulty, length, strict=True) if group in of]
        found |= {group: fmean(members)} if members else {}
    return found


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Percent, one decimal, overall, by difficulty and by length; empty outputs are left out of every mean."""
    rows = [(one.score or 0.0, one.metadata["difficulty"], one.metadata["length"]) for one in answers if one.output]
    return {name: round(100 * mean, 1) for name, mean in by_group(*zip(*rows, strict=True)).items()} if rows else {}

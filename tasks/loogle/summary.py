"""LooGLE's aggregates, 0 to 100: means, or for clozes the hits of all answers over all blanks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.tasks.scores import mean_measures
from kvbench.tasks.task import Scored


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Every metric by its name, 0 to 100; clozes are rounded to two decimals, as in the official code."""
    counted: list[Mapping[str, Sequence[int]]] = [getattr(answer, "measures", None) or {} for answer in answers]
    if not counted or "exact_match" not in counted[0]:
        return mean_measures(answers)
    sums = {name: [sum(column) for column in zip(*(one[name] for one in counted), strict=True)] for name in counted[0]}
    return {name: 100 * round(hits / blanks, 4) for name, (hits, blanks) in sums.items()}

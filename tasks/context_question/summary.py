"""Means of several metrics, in percent; of a single one the score is all there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from kvbench.tasks.task import Scored


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Mean of every metric by its name, 0 to 100."""
    measured: list[Mapping[str, float]] = [getattr(answer, "measures", None) or {} for answer in answers]
    names = dict.fromkeys(name for found in measured for name in found)
    return {name: 100 * fmean(found[name] for found in measured) for name in names}

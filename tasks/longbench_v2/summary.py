"""The percentages that LongBench v2's authors print: one decimal, empty outputs left out of every mean."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.longbench_v2.metrics import by_group
from kvbench.tasks.task import Scored


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Overall, by difficulty and by length; nothing where every output is empty."""
    rows = [(one.score or 0.0, one.metadata["difficulty"], one.metadata["length"]) for one in answers if one.output]
    return {name: round(100 * mean, 1) for name, mean in by_group(*zip(*rows, strict=True)).items()} if rows else {}

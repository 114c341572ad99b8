"""Where things go so that none covers another and every value stays where it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes

from kvbench.report.figures.sheet import Sheet
from kvbench.report.figures.style import POINT

APART = 7.0  # points between lines that stand side by side at one category: more than a marker is wide
TAKEN = 0.65  # of the way to the next category, which lines side by side take at most
SAME = 1.5  # points between two markers below which one covers the other
RING, CASING, DEEPEST = 3.0, 2.2, 3  # points by which a marker, and a line, grows for each that covers it; how often
EDGE = 8.5  # points above and below the values of a panel: half a marker

Point = tuple[float, float]  # in data coordinates
Spot = tuple[float, float]  # in points of the paper from the corner of its panel


def side_by_side(lines: int, wide: float) -> list[float]:
    """Where lines stand around the middle of a category that is `wide` points: shares of its width, in their order."""
    step = min(APART / wide, TAKEN / max(lines - 1, 1))
    return [step * (place - (lines - 1) / 2) for place in range(lines)]


def spots(axes: Axes, drawn: Sequence[Point], sheet: Sheet) -> list[Spot]:
    """Where points are drawn on a panel of a sheet; its limits are set."""
    shares = (axes.transScale + axes.transLimits).transform(drawn)
    return [(x * sheet.width / POINT, y * sheet.height / POINT) for x, y in shares.tolist()]


def covering(spot: Spot, later: Sequence[Sequence[Spot]]) -> int:
    """How many of the lines that are drawn later have a point on this one."""
    return min(DEEPEST, sum(any(_is_at(spot, other) for other in line) for line in later))


def covering_segment(start: Spot, end: Spot, later: Sequence[Sequence[Spot]]) -> int:
    """How many of the lines that are drawn later run over the whole of this segment."""
    over = [any(_is_at(start, a) and _is_at(end, b) for a, b in pairwise(line)) for line in later]
    return min(DEEPEST, sum(over))


def _is_at(one: Spot, other: Spot) -> bool:
    return abs(one[0] - other[0]) < SAME and abs(one[1] - other[1]) < SAME

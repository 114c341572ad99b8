"""Where things go so that none covers another and every value stays where it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from kvbench.report.figures.sheet import Gaps, Paper, Sheet, inches_wide
from kvbench.report.figures.style import FAINT, POINT, Look

APART = 7.0  # points between lines that stand side by side at one category: more than a marker is wide
TAKEN = 0.65  # of the way to the next category, which lines side by side take at most
SAME = 1.5  # points between two markers below which one covers the other
RING, CASING, DEEPEST = 3.0, 2.2, 3  # points by which a marker, and a line, grows for each that covers it; how often
EDGE = 8.5  # points above and below the values of a panel: half a marker
LABEL_SIZE, LABEL_HIGH = 8.0, 10.5  # points: type, and the room one name takes
GUTTER = 22.0  # points from the panel to the names, for their leaders
SAMPLE = 11.0  # points for the marker before a name
NARROWEST = 2.6  # inches of a panel that has names beside it: with less, a legend below is better

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


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Places in the order of `wanted`, at least `apart`, in [low, high], near what is wanted; of equals the first high.

    Neighbours that are too near are pooled around their mean (least squares, by pooling adjacent violators).
    Needs (len(wanted) - 1) * apart <= high - low.
    """
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))
    pools: list[list[float]] = []  # each: sum and number of the places its members would have if it began at 0
    for rank, i in enumerate(order):
        pools.append([wanted[i] - rank * apart, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    bases = [total / count for total, count in pools for _ in range(int(count))]
    room = high - low - (len(wanted) - 1) * apart
    assert room >= -1e-9, "more names than the panel is high"
    places = [0.0] * len(wanted)
    for rank, (i, base) in enumerate(zip(order, bases, strict=True)):
        places[i] = low + min(max(base - low, 0.0), room) + rank * apart
    return places


def sheet_beside(words: Sequence[str], size: tuple[float, float], paper: Paper) -> Sheet | None:
    """A sheet of one panel with room to its right for these names; None where they do not fit."""
    room = inches_wide(words, LABEL_SIZE) + (GUTTER + SAMPLE + 4) * POINT
    gaps = Gaps(right=Gaps.right + room)
    if paper.panel_wide(gaps) < NARROWEST:
        return None
    sheet = Sheet(1, 1, *size, gaps, paper)
    return sheet if len(words) * LABEL_HIGH * POINT <= sheet.height else None


@dataclass(frozen=True)
class Name:
    """What stands beside a panel: a name, how its line looks, and the point in data coordinates it belongs to."""

    words: str
    look: Look
    x: float
    y: float


def beside(axes: Axes, names: Sequence[Name], height: float) -> None:
    """Write the names to the right of a panel `height` inches high, each with a leader to its point; limits are set."""
    points = height / POINT
    low, high = axes.get_ylim()
    wanted = [(name.y - low) / (high - low) * points for name in names]
    places = spread(wanted, LABEL_HIGH, LABEL_HIGH / 2, points - LABEL_HIGH / 2)
    for name, place in zip(names, places, strict=True):
        at = axes.transAxes + ScaledTranslation(GUTTER * POINT, 0, axes.figure.dpi_scale_trans)
        axes.annotate(
            "",
            xy=(name.x, name.y),
            xycoords="data",
            xytext=(1, place / points),
            textcoords=at,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": name.look.colour, "linewidth": 0.5, "alpha": 0.55, "shrinkA": 0},
        )
        text = axes.annotate(
            name.words,
            xy=(1, place / points),
            xycoords=at,
            xytext=(SAMPLE, 0),
            textcoords="offset points",
            va="center_baseline",
            size=LABEL_SIZE,
            annotation_clip=False,
        )
        text.set_gid("name")
        sample = {"transform": at + ScaledTranslation(4 * POINT, 0, axes.figure.dpi_scale_trans), "clip_on": False}
        style = name.look.points if name.look.marker else {"marker": "_", "markeredgecolor": FAINT}
        axes.plot([1], [place / points], linestyle="none", gid="sample", **{**style, **sample, "markersize": 4.5})

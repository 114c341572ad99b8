"""Where things go so that none covers another: lines moved sideways, names beside the ends of their lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import ScaledTranslation, Transform

from kvbench.report.figures.style import FAINT, POINT, Look

APART = 5.0  # points between lines that would cover each other: a marker is as wide
TOUCHING = 5.0  # points
HIGHEST = 6.0  # points between the lowest and the highest of lines moved up and down: more would tell another score
EDGE = 8.5  # points above and below the values of a panel: a line moved that far, and half a marker
LINE_WIDE = 2.0  # points: a line, and a little white
LABEL_SIZE, LABEL_HIGH = 8.0, 10.5  # points: type, and the room one name takes
GUTTER = 22.0  # points from the panel to the names, for their leaders
SAMPLE = 11.0  # points for the marker before a name


Line = TypeVar("Line")


@dataclass(frozen=True)
class Spot:
    """A drawn point with its bar, in points of the paper from the corner of its panel."""

    x: float
    y: float
    low: float
    high: float

    def hides(self, other: Spot) -> bool:
        """Whether two points, bars included, would lie on each other."""
        beside = abs(self.x - other.x) < TOUCHING
        return beside and self.low <= other.high + TOUCHING and other.low <= self.high + TOUCHING

    def is_at(self, other: Spot) -> bool:
        """Whether two points are drawn at one place."""
        return abs(self.x - other.x) < TOUCHING and abs(self.y - other.y) < LINE_WIDE


@dataclass(frozen=True)
class Move:
    """By how many points a line is moved on the paper: to the right, and up."""

    right: float = 0.0
    up: float = 0.0


def dodges(lines: Sequence[Sequence[Spot]], most: float = 40.0, levels: Sequence[float] = ()) -> list[Move]:
    """How each line is moved: not at all where it touches no other, else side by side with those it does.

    Side by side they stand as they would without it, the one with the smaller bytes to the left. Lines that have a
    whole segment in common are also moved up and down, by about their own width, or less.
    most: the width in points that a group of lines may spread over. levels: heights in points of horizontal lines,
    which stay where they are.
    """
    touching = _groups(lines, lambda a, b: any(one.hides(other) for one in a for other in b))
    order = sorted(range(len(lines)), key=lambda i: round(fmean(spot.x for spot in lines[i])))
    right = _apart(touching, order, APART, most)
    all_lines: list[Sequence[Spot] | float] = [*lines, *levels]
    same = _groups(all_lines, _share_a_segment)
    fixed = set(range(len(lines), len(all_lines)))
    down = _apart(same, _fixed_amid(same, fixed), LINE_WIDE, HIGHEST)
    for i in fixed:
        down = [low - down[i] if same[j] == same[i] else low for j, low in enumerate(down)]
    return [Move(across, -low) for across, low in zip(right, down, strict=False)]


def _fixed_amid(group: Sequence[int], fixed: Collection[int]) -> list[int]:
    """The members of all groups in their order, those that are fixed in the middle of theirs."""
    order = []
    for name in dict.fromkeys(group):
        free = [i for i, g in enumerate(group) if g == name and i not in fixed]
        stay = [i for i, g in enumerate(group) if g == name and i in fixed]
        order += [*free[: len(free) // 2], *stay, *free[len(free) // 2 :]]
    return order


def _share_a_segment(first: Sequence[Spot] | float, second: Sequence[Spot] | float) -> bool:
    """Of two lines, or of a line and the height of a level."""
    if isinstance(first, float):
        return not isinstance(second, float) and _share_a_segment(second, first)
    if isinstance(second, float):
        return any(abs(a.y - second) < LINE_WIDE and abs(b.y - second) < LINE_WIDE for a, b in pairwise(first))
    return any(a.is_at(c) and b.is_at(d) for a, b in pairwise(first) for c, d in pairwise(second))


def _groups(lines: Sequence[Line], joined: Callable[[Line, Line], bool]) -> list[int]:
    """The group of every line: those that are joined, directly or through others, are in one."""
    group = list(range(len(lines)))
    for i, line in enumerate(lines):
        for j in range(i):
            if group[i] != group[j] and joined(line, lines[j]):
                group = [group[j] if g == group[i] else g for g in group]
    return group


def _apart(group: Sequence[int], order: Sequence[int], step: float, most: float) -> list[float]:
    """Places of the members of each group around 0, `step` apart, or less where `most` is too narrow for that."""
    moved = [0.0] * len(group)
    for name in set(group):
        members = [i for i in order if group[i] == name]
        own = min(step, most / max(len(members) - 1, 1))
        for place, i in enumerate(members):
            moved[i] = own * (place - (len(members) - 1) / 2)
    return moved


def shifted(axes: Axes, move: Move) -> Transform:
    """The axes' data coordinates, moved on the paper; what artists say of their data stays true."""
    return axes.transData + ScaledTranslation(move.right * POINT, move.up * POINT, axes.figure.dpi_scale_trans)


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


def fit_beside(names: int, height: float) -> bool:
    """Whether so many names fit beside a panel of so many inches."""
    return names * LABEL_HIGH * POINT <= height


@dataclass(frozen=True)
class Name:
    """What stands beside a panel: a name, how its line looks, and the point in data coordinates it belongs to."""

    words: str
    look: Look
    x: float
    y: float
    moved: Move = Move()


def beside(axes: Axes, names: Sequence[Name], height: float) -> list[Annotation]:
    """Write the names to the right of a panel `height` inches high, each with a leader to its point; limits are set."""
    points = height / POINT
    low, high = axes.get_ylim()
    wanted = [(name.y - low) / (high - low) * points for name in names]
    places = spread(wanted, LABEL_HIGH, LABEL_HIGH / 2, points - LABEL_HIGH / 2)
    written = []
    for name, place in zip(names, places, strict=True):
        at = axes.transAxes + ScaledTranslation(GUTTER * POINT, 0, axes.figure.dpi_scale_trans)
        axes.annotate(
            "",
            xy=(name.x, name.y),
            xycoords=shifted(axes, name.moved),
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
        written.append(text)
    return written


def room_for(names: Sequence[Annotation]) -> float:
    """Inches to the right of a panel that its names take."""
    wide = max((name.get_window_extent().width / name.figure.dpi for name in names if name.figure), default=0.0)
    return wide + (GUTTER + SAMPLE + 4) * POINT

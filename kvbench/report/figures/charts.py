"""What a benchmark measured of many things at one size each: a row per thing, under titles, over one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Dot
from kvbench.report.figures.sheet import Gaps, Paper, Sheet, inches_wide
from kvbench.report.figures.style import FAINT, INK, Look, looks_of

WIDE, HIGH = 2.9, 0.165  # inches: the axis, and a row
TYPE = 7.0  # points
BESIDE = 0.1  # inches between the axis and the words beside it
MOST = 45  # rows in a column, titles included, if two columns would be shorter
MARGIN = 1.2  # of the smallest and the largest figure


def draw(chart: Chart, header: Sequence[str], paper: Paper | None = None) -> Figure:
    """Rows of dots from top to bottom, in one or two columns. header: the title, then what all hangs on."""
    columns = _columns(chart.groups)
    rows = [row for group in chart.groups for row in group.rows]
    methods = list(dict.fromkeys(dot.method for row in rows for dot in row.dots))
    looks = looks_of(methods)
    left = inches_wide([row.label for row in rows], TYPE)
    right = inches_wide([row.words for row in rows], TYPE) + BESIDE
    most = max(sum(1 + len(group.rows) for group in column) for column in columns)
    gaps = Gaps(left=left + 0.1, right=right, across=left + right + 0.35, top=0.1)
    sheet = Sheet(len(columns), len(columns), WIDE, HIGH * most, gaps, paper, in_shape=False)
    for axes, column in zip(sheet.axes, columns, strict=True):
        _column(axes, column, looks, left + 0.1, sheet.width)
        _axis(axes, chart, [x for row in rows for x in _figures(row)], most)
    named = all(dot.method == row.label for row in rows for dot in row.dots)
    handles = [sheet.axes[0].plot([], [], linestyle="none", **_marker(looks[method]))[0] for method in methods]
    return sheet.finish(header[0], [*header[1:], *chart.notes], None if named else (handles, methods))


def _columns(groups: Sequence[ChartGroup]) -> list[list[ChartGroup]]:
    """One column, or two of about the same height, where one would be long."""
    high = [1 + len(group.rows) for group in groups]
    if sum(high) <= MOST or len(groups) == 1:
        return [list(groups)]
    first = min(range(len(groups) - 1, 0, -1), key=lambda n: max(sum(high[:n]), sum(high[n:])))
    return [list(groups[:first]), list(groups[first:])]


def _column(axes: Axes, groups: Sequence[ChartGroup], looks: dict[str, Look], left: float, wide: float) -> None:
    """The groups below each other, rows and titles 1 high. left: inches left of the axis, whose own are `wide`."""
    labels: dict[float, str] = {}
    for place, line in enumerate(_lines(groups)):
        if isinstance(line, ChartGroup):
            _title(axes, line.title, place, left / wide)
            continue
        labels[place] = line.label
        beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "size": TYPE, "color": FAINT}
        axes.text(1 + BESIDE / wide, place, line.words, **beside)
        if line.bound is not None:
            axes.plot([line.bound, line.bound], [place - 0.4, place + 0.4], color=INK, linewidth=1.6, gid="bound")
        for dot in line.dots:
            _dot(axes, dot, place, looks[dot.method])
    axes.set_yticks(list(labels), list(labels.values()), size=TYPE)
    axes.tick_params(axis="y", length=0)


def _title(axes: Axes, words: str, place: float, left: float) -> None:
    """On white: a long one runs into the axis."""
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    across = axes.get_yaxis_transform()
    title = axes.text(-left, place, words, transform=across, va="center", size=TYPE, weight="bold", bbox=white)
    title.set_gid("title")


def _lines(groups: Sequence[ChartGroup]) -> Iterator[ChartGroup | ChartRow]:
    for group in groups:
        yield group
        yield from group.rows


def _dot(axes: Axes, dot: Dot, place: float, look: Look) -> None:
    if dot.low is not None and dot.high is not None:
        axes.plot([dot.low, dot.high], [place, place], color=look.colour, linewidth=0.9, alpha=0.5, gid="bar")
    axes.plot([dot.x], [place], linestyle="none", label=dot.method, gid="dot", **_marker(look))


def _marker(look: Look) -> dict[str, Any]:
    return {**look.points, "marker": look.marker or "o", "markersize": 4}


def _figures(row: ChartRow) -> Iterator[float]:
    """All that lies on the axis."""
    yield from () if row.bound is None else (row.bound,)
    for dot in row.dots:
        yield from (x for x in (dot.x, dot.low, dot.high) if x is not None)


def _axis(axes: Axes, chart: Chart, figures: Sequence[float], rows: int) -> None:
    """By factors, with plain numbers; room for so many rows."""
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (6, 2)), gid="one")
    axes.set(xscale="log", ylim=(rows - 0.5, -0.5), xlabel=chart.x_label)
    axes.set_xlim(min(1.0, *figures, 1.0) / MARGIN, max(1.0, *figures, 1.0) * MARGIN)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 100 else (1,)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%" if chart.percent else f"{x:g}"))

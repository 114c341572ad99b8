"""What a benchmark measured of many things at one size each: a row per thing, under titles, over one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Dot
from kvbench.report.figures.sheet import Paper, Sheet, by_factors, inches_wide
from kvbench.report.figures.style import FAINT, INK, Look, looks_of

WIDE, HIGH = 2.9, 0.165  # inches: the axis, and a row
TYPE = 7.0  # points
MOST = 45  # rows in a column, titles included, if two columns would be shorter
MARGIN = 1.2  # of the smallest and the largest figure


def draw(chart: Chart, header: Sequence[str], paper: Paper | None = None) -> Figure:
    """Rows of dots from top to bottom, in one or two columns. header: the title, then the conditions."""
    columns = _columns(chart.groups)
    rows = [row for group in chart.groups for row in group.rows]
    methods = list(dict.fromkeys(dot.method for row in rows for dot in row.dots))
    looks = looks_of(methods)
    most = max(sum(1 + len(group.rows) for group in column) for column in columns)
    left, right = (inches_wide(words, TYPE) for words in ([row.label for row in rows], [row.words for row in rows]))
    beside = left + max(right, 1.1 * inches_wide([group.title for group in chart.groups], TYPE) - WIDE) + 0.3
    sheet = Sheet(len(columns), 2, WIDE + beside, HIGH * most + 0.6, paper, beside=beside, in_shape=False)
    for axes, column in zip(sheet.axes, columns, strict=True):
        _column(axes, column, looks)
        _axis(axes, chart, [1.0, *(x for row in rows for x in _figures(row))], most)
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


def _column(axes: Axes, groups: Sequence[ChartGroup], looks: dict[str, Look]) -> None:
    """The groups below each other, rows and titles 1 high; words beside a row stand right of the axis."""
    across: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "size": TYPE}
    labels: dict[float, str] = {}
    first = 0
    for group in groups:
        axes.text(0.01, first, group.title, weight="bold", gid="title", **across)
        for place, row in enumerate(group.rows, start=first + 1):
            labels[place] = row.label
            axes.text(1.03, place, row.words, color=FAINT, **across)
            if row.bound is not None:
                axes.plot([row.bound, row.bound], [place - 0.4, place + 0.4], color=INK, linewidth=1.6, gid="bound")
            for dot in row.dots:
                _dot(axes, dot, place, looks[dot.method])
        first += 1 + len(group.rows)
    axes.set_yticks(list(labels), list(labels.values()), size=TYPE)
    axes.tick_params(axis="y", length=0)


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
    by_factors(axes, "x", (min(figures), max(figures)))
    axes.set(ylim=(rows - 0.5, -0.5), xlabel=chart.x_label)
    axes.set_xlim(min(figures) / MARGIN, max(figures) * MARGIN)
    if chart.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))

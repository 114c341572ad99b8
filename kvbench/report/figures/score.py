"""The picture of every paper: score against the budget, and against the bytes really held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbench.analysis.result import Result
from kvbench.report.figures import places
from kvbench.report.figures.panels import Panel, height, panels_of, sides
from kvbench.report.figures.places import Name, Point, Spot
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.sheet import Paper, Sheet, inches_wide, legend_of
from kvbench.report.figures.style import FAINT, POINT, Look, byte_unit

SCORE = "score (mean over examples)"
ALONE, AMONG = (5.2, 3.9), (2.75, 2.1)  # inches: a panel by itself, and one of several
MARGIN = 18.0  # points from the first and the last bytes to the edges
FIFTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
TICK, DIGIT = 0.4, 0.085  # inches that a tick's number takes at least, and one of its digits
LABEL = 9.0  # points
RINGS = " Rings: points below others."


@dataclass(frozen=True)
class Axis:
    """What stands below: its words, where a cell is on it, and the names of its categories.

    Budgets are categories, at equal steps, so that lines may stand side by side at one. Bytes are a measure (None),
    along which nothing is moved.
    """

    words: str
    at: Callable[[Result], float]
    categories: tuple[str, ...] | None = None


def against_budget(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """One picture for budgets in tokens, one for budgets that are shares of the prompt; none where there are none."""
    found = []
    for share in (False, True):
        of_kind = [cell for cell in cells if cell.budget is None or isinstance(cell.budget, float) == share]
        if any(cell.budget is not None and cell.score is not None for cell in of_kind):
            name = "budget-share" if share else "budget"
            found.append((name, _picture("Score against the budget", of_kind, looks, _budget_axis, paper)))
    return found


def _budget_axis(panel: Panel) -> Axis:
    budgets = sorted({c.budget for c in panel.cells if c.budget is not None and c.score is not None})
    share = any(isinstance(budget, float) for budget in budgets)
    words = "budget (share of the prompt)" if share else "budget (tokens per KV head and layer)"
    names = tuple(f"{100 * budget:.3g}%" if share else f"{budget:g}" for budget in budgets)
    return Axis(words, lambda cell: float(budgets.index(cell.budget or 0)), names)


def against_bytes(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """Score against the mean bytes that an example's cache held at its end, all but room to spare."""
    held = [cell for cell in cells if cell.cache_bytes and cell.score is not None]
    if not any(not cell.is_full for cell in held):
        return []
    return [("bytes", _picture("Score against the bytes really held", [*cells], looks, byte_axis, paper))]


def byte_axis(panel: Panel) -> Axis:
    """Bytes held, in a unit that suits the panel."""
    unit, size = byte_unit(min((cell.cache_bytes for cell in panel.cells if cell.cache_bytes), default=1.0))
    words = f"cache held per example ({unit}: keys, values, positions, statistics, no spare room)"
    return Axis(words, lambda cell: (cell.cache_bytes or 0) / size)


def _picture(
    title: str,
    cells: Sequence[Result],
    looks: Mapping[str, Look],
    axis_of: Callable[[Panel], Axis],
    paper: Paper | None,
) -> Figure:
    panels = [panel for panel in panels_of(cells) if _lines_of(panel, axis_of(panel))]
    alone = len(panels) == 1
    paper = paper or Paper()
    beside = places.sheet_beside(_words(panels[0], axis_of(panels[0])), ALONE, paper) if alone else None
    sheet = beside or Sheet(len(panels), min(3, len(panels)), *(ALONE if alone else AMONG), paper=paper)
    several_models = len({panel.model for panel in panels}) > 1
    for index, (panel, axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        axis = axis_of(panel)
        names = _draw(axes, panel, axis, looks, sheet)
        axes.set_title(f"{panel.task}, {panel.model}" if several_models else panel.task, loc="left")
        if sheet.is_bottom(index):
            axes.set_xlabel(fitting(axis.words, sheet))
        axes.set_ylabel(SCORE if alone else "score") if sheet.is_left(index) else axes.tick_params(labelleft=False)
    shown = [cell for panel in panels for cell in panel.cells]
    banded = any(cell.is_full and cell.score_low is not None for cell in shown)
    said = notes(shown, f"Bars{', and the grey band of the full cache' if banded else ''}: 95% intervals.")
    if axis_of is byte_axis:
        said[0] += RINGS * ringed(sheet)
    else:
        said[0] += " Budgets stand at equal steps, lines side by side."
    if beside:
        places.beside(sheet.axes[0], names, sheet.height)
    return sheet.finish(title, said, None if beside else legend_of(sheet.axes))


def fitting(words: str, sheet: Sheet) -> str:
    """A label without what stands after its colon where its panel is not wide enough for all of it."""
    before, colon, _ = words.partition(":")
    return f"{before})" if colon and inches_wide([words], LABEL) > sheet.width else words


def _lines_of(panel: Panel, axis: Axis) -> dict[str, list[Result]]:
    """What is drawn as points: each policy's scored cells that have a place on the axis."""
    found = {}
    for policy, line in panel.lines.items():
        placed = [
            cell
            for cell in line
            if cell.score is not None
            and not cell.is_full
            and (cell.cache_bytes if axis.categories is None else cell.budget)
        ]
        if placed:
            found[policy] = sorted(placed, key=axis.at)
    return found


def _level_cells(panel: Panel, axis: Axis) -> list[Result]:
    """What has no place on the axis: the full cache, and on budgets whatever has none."""
    budgets = axis.categories is not None
    return [c for c in panel.cells if c.score is not None and (c.is_full or (budgets and c.budget is None))]


def _words(panel: Panel, axis: Axis) -> list[str]:
    """The names of everything in a panel."""
    return [*map(_level_name, _level_cells(panel, axis)), *_lines_of(panel, axis)]


def _level_name(cell: Result) -> str:
    return f"{cell.line}, {_amount(cell.cache_bytes)}" if cell.cache_bytes else cell.line


def _amount(held: float) -> str:
    unit, size = byte_unit(held)
    return f"{held / size:.4g} {unit}" if held / size < 1000 else f"{held / size:.0f} {unit}"


def _draw(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look], sheet: Sheet) -> list[Name]:
    """Draw a panel; returns the names of its lines."""
    lines = _lines_of(panel, axis)
    set_scores(axes, panel, sheet)
    aside = [0.0] * len(lines)
    if axis.categories is None:
        set_bytes(axes, [axis.at(cell) for line in lines.values() for cell in line], sheet)
    else:
        set_categories(axes, axis.categories, sheet)
        aside = places.side_by_side(len(lines), sheet.width / POINT / len(axis.categories))
    names = _levels(axes, panel, axis, looks)
    shifted = zip(lines.values(), aside, strict=True)
    drawn = [[(axis.at(cell) + move, height(cell)) for cell in line] for line, move in shifted]
    spots = [places.spots(axes, points, sheet) for points in drawn]
    for place, (policy, line) in enumerate(lines.items()):
        _line(axes, drawn[place], [sides(cell) for cell in line], looks[policy], policy)
        later = spots[place + 1 :] if axis.categories is None else []
        _mark(axes, drawn[place], looks[policy], spots[place], later)
        names.append(Name(policy, looks[policy], *drawn[place][-1]))
    return names


def _line(axes: Axes, drawn: Sequence[Point], sides: Sequence[Point], look: Look, label: str) -> None:
    """One policy's line with the bars of its 95% intervals."""
    x, y = zip(*drawn, strict=True)
    bars: dict[str, Any] = {"fmt": "none", "ecolor": look.colour, "elinewidth": 0.9, "alpha": 0.5}
    axes.errorbar(x, y, list(zip(*sides, strict=True)), **bars)
    axes.plot(x, y, label=label, zorder=3, **look.plot)


def _mark(
    axes: Axes, drawn: Sequence[Point], look: Look, spots: Sequence[Spot], later: Sequence[Sequence[Spot]]
) -> None:
    """A line's points, above all lines. What later lines cover stands out: segments have a casing, points are rings."""
    for (one, other), (start, end) in zip(pairwise(drawn), pairwise(spots), strict=True):
        if many := places.covering_segment(start, end, later):
            wide = rcParams["lines.linewidth"] + places.CASING * many
            axes.plot(*zip(one, other, strict=True), color=look.colour, linewidth=wide, alpha=0.35, zorder=2.5)
    for point, spot in zip(drawn, spots, strict=True):
        mark(axes, point, look.points, places.covering(spot, later), "above")


def mark(axes: Axes, point: Point, style: Mapping[str, Any], covered: int, gid: str, zorder: int = 4) -> None:
    """One point, as a ring around those that cover it."""
    ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.3} if covered else {}
    size = rcParams["lines.markersize"] + places.RING * covered
    look = {"linestyle": "none", "markersize": size, **style, **ring}
    axes.plot(*[[value] for value in point], gid=gid, zorder=zorder, **look)


def ringed(sheet: Sheet) -> bool:
    """Whether any point is drawn as a ring."""
    return any(line.get_markersize() > rcParams["lines.markersize"] for axes in sheet.axes for line in axes.get_lines())


def _levels(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look]) -> list[Name]:
    """Horizontal lines of what has no place on the axis, the interval of the full cache as a band."""
    names = []
    for cell in _level_cells(panel, axis):
        look = looks[cell.line]
        axes.axhline(height(cell), color=look.colour, linestyle=look.line, linewidth=1.2, label=cell.line, zorder=3.5)
        if cell.is_full and cell.score_low is not None and cell.score_high is not None:
            axes.axhspan(cell.score_low, cell.score_high, color=FAINT, alpha=0.13, linewidth=0, zorder=0.5)
        names.append(Name(_level_name(cell), look, axes.get_xlim()[1], height(cell)))
    return names


def set_scores(axes: Axes, panel: Panel, sheet: Sheet) -> None:
    """Limits of the scores so that every point and interval is inside."""
    ends = [v for c in panel.cells for v in (c.score, c.score_low, c.score_high) if v is not None]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
    edge = places.EDGE * POINT / sheet.height * (high - low)
    axes.set_ylim(low - edge, high + edge)
    if (low, high) == (0.0, 1.0):
        axes.set_yticks(FIFTHS)


def set_bytes(axes: Axes, values: Sequence[float], sheet: Sheet) -> None:
    """Limits and ticks of an axis by factors."""
    least, most = min(values), max(values)
    margin = MARGIN * POINT / sheet.width
    pad = (most / least) ** (margin / (1 - 2 * margin)) if most > least else 1.5
    axes.set_xscale("log")
    axes.set_xlim(least / pad, most * pad)
    _byte_ticks(axes, sheet.width)


def set_categories(axes: Axes, names: Sequence[str], sheet: Sheet) -> None:
    """The categories at equal steps, a faint line between them; without labels that would run into their neighbours."""
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_xticks([place + 0.5 for place in range(len(names) - 1)], minor=True)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", visible=False)
    axes.grid(axis="x", which="minor", visible=True, linewidth=0.6)
    free = 0.0
    for place, label in enumerate(axes.get_xticklabels()):
        middle, half = (place + 0.5) * sheet.width / len(names), 0.04 * len(label.get_text()) + 0.03
        label.set_visible(middle - half >= free)
        free = middle + half if label.get_visible() else free


def _byte_ticks(axes: Axes, width: float) -> None:
    """As many round numbers as there is room for."""
    low, high = axes.get_xlim()
    tenths = [[n / 10 for n in range(10, 100, step)] for step in (1, 2, 5)] if high < 2 * low else []
    for subs in (*tenths, (1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [sub * 10**power for power in range(-3, 13) for sub in subs if low <= sub * 10**power <= high]
        rooms = [max(TICK, DIGIT * len(f"{tick:,g}")) for tick in ticks[1:]]
        apart = [log2(b / a) / log2(high / low) * width for a, b in pairwise(ticks)]
        if all(inches >= room for inches, room in zip(apart, rooms, strict=True)):
            break
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])

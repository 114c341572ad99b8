"""The picture of every paper: score against the budget, and against the bytes really held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.analysis.result import Result
from kvbench.report.figures.panels import Panel, height, panels_of, sides
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.sheet import Paper, Sheet, by_factors, legend_of, side_by_side
from kvbench.report.figures.style import FAINT, Look, byte_unit

SCORE = "score (mean over examples)"
ALONE, AMONG = (6.0, 4.5), (3.1, 2.6)  # inches: a panel by itself, and one of several
RING, DEEPEST = 3.0, 3  # points by which a marker grows for each that covers it; how often at most
RINGS = " Rings: points below others."

Point = tuple[float, float]  # in data coordinates


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: its label, where a result is on it, and the names of its categories.

    Budgets are categories at equal steps, so that lines may stand side by side at one. Bytes are a measure (None),
    along which nothing is moved.
    """

    words: str
    at: Callable[[Result], float]
    categories: tuple[str, ...] | None = None

    def has(self, cell: Result) -> bool:
        """Whether a result is a point on it: the full cache is a level instead."""
        placed = cell.cache_bytes if self.categories is None else cell.budget
        return cell.value is not None and not cell.is_full and bool(placed)

    def is_level(self, cell: Result) -> bool:
        """Whether a result is a level: the full cache and, beside budgets, whatever has none."""
        return cell.value is not None and (cell.is_full or (self.categories is not None and cell.budget is None))


def against_budget(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """One picture for budgets in tokens, one for budgets that are shares of the prompt; none where there are none."""
    found = []
    for share in (False, True):
        of_kind = [cell for cell in cells if cell.budget is None or isinstance(cell.budget, float) == share]
        if any(cell.budget is not None and cell.score is not None for cell in of_kind):
            name = "budget-share" if share else "budget"
            found.append((name, _picture("Score against the budget", of_kind, looks, budget_axis, paper)))
    return found


def budget_axis(cells: Sequence[Result]) -> Axis:
    """Budgets as categories."""
    budgets = sorted({c.budget for c in cells if c.budget is not None and c.value is not None})
    share = any(isinstance(budget, float) for budget in budgets)
    words = "budget (share of the prompt)" if share else "budget (tokens per KV head and layer)"
    names = tuple(f"{100 * budget:.3g}%" if share else f"{budget:g}" for budget in budgets)
    return Axis(words, lambda cell: float(budgets.index(cell.budget or 0)), names)


def against_bytes(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """Score against the mean bytes that an example's cache held at its end, without spare bytes."""
    held = [cell for cell in cells if cell.cache_bytes and cell.score is not None]
    if not any(not cell.is_full for cell in held):
        return []
    return [("bytes", _picture("Score against the bytes really held", [*cells], looks, byte_axis, paper))]


def byte_axis(cells: Sequence[Result]) -> Axis:
    """Bytes held, in a unit that suits the smallest."""
    unit, size = byte_unit(min((cell.cache_bytes for cell in cells if cell.cache_bytes), default=1.0))
    return Axis(f"cache held per example ({unit})", lambda cell: (cell.cache_bytes or 0) / size)


BYTES = "Cache held: keys, values, positions and statistics, no spare bytes."


def _picture(
    title: str,
    cells: Sequence[Result],
    looks: Mapping[str, Look],
    axis_of: Callable[[Sequence[Result]], Axis],
    paper: Paper | None,
) -> Figure:
    scored = [cell for cell in cells if not cell.reads]
    axes_of = [(panel, axis_of(panel.cells)) for panel in panels_of(scored)]
    panels = [(panel, axis) for panel, axis in axes_of if any(map(axis.has, panel.cells))]
    alone = len(panels) == 1
    sheet = Sheet(len(panels), 3, *(ALONE if alone else AMONG), paper)
    several_models = len({panel.model for panel, _ in panels}) > 1
    rings = False
    for index, ((panel, axis), axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        rings |= _draw(axes, panel, axis, looks)
        sheet.set_title(axes, f"{panel.task}, {panel.model}" if several_models else panel.task)
        if sheet.is_bottom(index):
            axes.set_xlabel(axis.words)
        axes.set_ylabel(SCORE if alone else "score") if sheet.is_left(index) else axes.tick_params(labelleft=False)
    shown = [cell for panel, _ in panels for cell in panel.cells]
    banded = any(cell.is_full and cell.score_low is not None for cell in shown)
    said = notes(shown, f"Bars{', and the grey band of the full cache' if banded else ''}: 95% intervals.")
    if axis_of is byte_axis:
        said[0] += RINGS * rings
        levels = [_level_name(c, not alone) for panel, axis in panels for c in panel.cells if axis.is_level(c)]
        said += [f"Not on the axis: {'; '.join(levels)}."] * bool(levels) + [BYTES]
    else:
        said[0] += " Budgets stand at equal steps, lines side by side."
    return sheet.finish(title, said, legend_of(sheet.axes))


def _level_name(cell: Result, with_task: bool) -> str:
    where = f" on {cell.task}" if with_task else ""
    if not cell.cache_bytes:
        return cell.line
    unit, size = byte_unit(cell.cache_bytes)
    return f"{cell.line}{where}, {cell.cache_bytes / size:.4g} {unit}"


def _draw(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look]) -> bool:
    """Draw a panel; returns whether any point is a ring."""
    placed = {line: sorted(filter(axis.has, own), key=axis.at) for line, own in panel.lines.items()}
    lines = {line: own for line, own in placed.items() if own}
    set_scores(axes, panel)
    aside = [0.0] * len(lines)
    if axis.categories is None:
        set_bytes(axes, [axis.at(cell) for line in lines.values() for cell in line])
    else:
        set_categories(axes, axis.categories)
        aside = side_by_side(len(lines))
    for cell in filter(axis.is_level, panel.cells):
        _level(axes, cell, looks[cell.line])
    drawn = [
        [(axis.at(cell) + move, height(cell)) for cell in line]
        for line, move in zip(lines.values(), aside, strict=True)
    ]
    rings = False
    for place, (name, line) in enumerate(lines.items()):
        _line(axes, drawn[place], [sides(cell) for cell in line], looks[name], name)
        for point in drawn[place]:
            covered = covering(point, drawn[place + 1 :])
            mark(axes, point, looks[name].points, covered, "above")
            rings |= covered > 0
    return rings


def _line(axes: Axes, drawn: Sequence[Point], sides: Sequence[Point], look: Look, label: str) -> None:
    """One policy's line with the bars of its 95% intervals."""
    x, y = zip(*drawn, strict=True)
    bars: dict[str, Any] = {"fmt": "none", "ecolor": look.colour, "elinewidth": 0.9, "alpha": 0.5}
    axes.errorbar(x, y, list(zip(*sides, strict=True)), **bars)
    axes.plot(x, y, label=label, zorder=3, **look.plot)


def covering(point: Point, later: Sequence[Sequence[Point]]) -> int:
    """How many of the lines that are drawn later have a point at the same place, to three digits."""
    x, y = point
    same = (any(abs(a - x) <= 1e-3 * abs(x) and abs(b - y) <= 1e-3 for a, b in line) for line in later)
    return min(DEEPEST, sum(same))


def mark(axes: Axes, point: Point, style: Mapping[str, Any], covered: int, gid: str, zorder: int = 4) -> None:
    """One point above all lines; a ring around the later points that cover it."""
    ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.3} if covered else {}
    size = rcParams["lines.markersize"] + RING * covered
    look = {"linestyle": "none", "markersize": size, **style, **ring}
    axes.plot(*[[value] for value in point], gid=gid, zorder=zorder, **look)


def _level(axes: Axes, cell: Result, look: Look) -> None:
    """A horizontal line, the interval of the full cache as a band."""
    axes.axhline(height(cell), color=look.colour, linestyle=look.line, linewidth=1.2, label=cell.line, zorder=3.5)
    if cell.is_full and cell.score_low is not None and cell.score_high is not None:
        axes.axhspan(cell.score_low, cell.score_high, color=FAINT, alpha=0.13, linewidth=0, zorder=0.5)


def set_scores(axes: Axes, panel: Panel) -> None:
    """Limits of the scores so that every point and interval is inside."""
    ends = [v for c in panel.cells for v in (c.score, c.score_low, c.score_high) if v is not None]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
    edge = 0.04 * (high - low)
    axes.set_ylim(low - edge, high + edge)
    if (low, high) == (0.0, 1.0):
        axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


def set_bytes(axes: Axes, values: Sequence[float]) -> None:
    """Limits and ticks of an axis by factors."""
    least, most = min(values), max(values)
    by_factors(axes, "x", (least, most))
    pad = (most / least) ** 0.06 if most > least else 1.5
    axes.set_xlim(least / pad, most * pad)


def set_categories(axes: Axes, names: Sequence[str]) -> None:
    """The categories at equal steps, a faint line between them."""
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names, rotation=45 if len(names) > 6 else 0)
    axes.set_xticks([place + 0.5 for place in range(len(names) - 1)], minor=True)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", visible=False)
    axes.grid(axis="x", which="minor", visible=True, linewidth=0.6)

"""Figures of the score against the budget, and against the bytes held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures.panels import Panel, notes, panels_of
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import FAINT, Look, by_factors, byte_unit, side_by_side
from kvbench.results.result import Result

ALONE, AMONG = (6.0, 4.5), (3.1, 2.6)  # inches: a single panel, and one of several


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: its label, the coordinate of a result, and the names of its categories.

    Budgets are categories at equal steps, so that lines can be shifted against each other. Bytes are a continuous axis
    without categories.
    """

    label: str
    at: Callable[[Result], float]
    categories: tuple[str, ...] = ()

    def has(self, cell: Result) -> bool:
        """Whether a result is a point on the axis; the full cache is a level instead."""
        return (
            cell.score is not None and not cell.is_full and bool(cell.budget if self.categories else cell.cache_bytes)
        )

    def is_level(self, cell: Result) -> bool:
        """Whether a result is a horizontal line: the full cache, and on a budget axis a policy without budget."""
        return cell.score is not None and (cell.is_full or (bool(self.categories) and cell.budget is None))


def against_budget(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """One figure for budgets in tokens, and one for budgets that are shares of the prompt."""
    found = []
    for share in (False, True):
        of_kind = [cell for cell in cells if cell.budget is None or isinstance(cell.budget, float) == share]
        if any(cell.budget is not None and cell.score is not None for cell in of_kind):
            figure = _figure("Score against the budget", of_kind, looks, _budget_axis, paper or Paper(), [])
            found.append(("budget-share" if share else "budget", figure))
    return found


def _budget_axis(cells: Sequence[Result]) -> Axis:
    budgets = sorted({c.budget for c in cells if c.budget is not None and c.score is not None})
    share = any(isinstance(budget, float) for budget in budgets)
    label = "budget (share of the prompt)" if share else "budget (tokens per KV head and layer)"
    names = tuple(f"{100 * budget:.3g}%" if share else f"{budget:g}" for budget in budgets)
    return Axis(label, lambda cell: float(budgets.index(cell.budget or 0)), names)


def against_bytes(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """Score against the mean bytes that an example's cache held at its end, without reserved but unused bytes."""
    if not any(cell.cache_bytes and cell.score is not None and not cell.is_full for cell in cells):
        return []
    full = []
    for cell in cells:
        if cell.is_full and cell.score is not None and not cell.reads:
            unit, size = byte_unit(cell.cache_bytes or 0)
            full.append(f"{cell.line} on {cell.task_label}: {(cell.cache_bytes or 0) / size:.4g} {unit}")
    below = [f"Not on the axis: {'; '.join(full)}."] if full else []
    below.append("Cache held: keys, values, positions and statistics, without unused capacity.")
    figure = _figure("Score against the bytes held", cells, looks, _byte_axis, paper or Paper(), below)
    return [("bytes", figure)]


def _byte_axis(cells: Sequence[Result]) -> Axis:
    unit, size = byte_unit(min((cell.cache_bytes for cell in cells if cell.cache_bytes), default=1.0))
    return Axis(f"cache held per example ({unit})", lambda cell: (cell.cache_bytes or 0) / size)


def _figure(
    title: str,
    cells: Sequence[Result],
    looks: Mapping[str, Look],
    axis_of: Callable[[Sequence[Result]], Axis],
    paper: Paper,
    below: Sequence[str],
) -> Figure:
    axes_of = [(panel, axis_of(panel.cells)) for panel in panels_of(cell for cell in cells if not cell.reads)]
    panels = [(panel, axis) for panel, axis in axes_of if any(map(axis.has, panel.cells))]
    sheet = Sheet(len(panels), 3, *(ALONE if len(panels) == 1 else AMONG), paper)
    several_models = len({panel.model for panel, _ in panels}) > 1
    for index, ((panel, axis), axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        _draw(axes, panel, axis, looks, paper)
        sheet.set_title(axes, f"{panel.task}, {panel.model}" if several_models else panel.task)
        if sheet.is_bottom(index):
            axes.set_xlabel(axis.label)
        if sheet.is_left(index):
            axes.set_ylabel("score (mean over examples)" if len(panels) == 1 else "score")
    shown = [cell for panel, _ in panels for cell in panel.cells]
    found = notes(shown, "Bars, and the grey band of the full cache: 95% intervals.")
    return sheet.finish(title, [*found, *below])


def _draw(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look], paper: Paper) -> None:
    """Draws one line with 95% intervals for every policy, and the levels."""
    lines: dict[str, list[Result]] = {}
    for cell in panel.cells:
        if axis.has(cell):
            lines.setdefault(cell.line, []).append(cell)
    for cell in filter(axis.is_level, panel.cells):
        look = looks[cell.line]
        axes.axhline(cell.score or 0, color=look.colour, linestyle=look.line, linewidth=1.2, label=cell.line, zorder=3)
        if cell.is_full and cell.ends is not None:
            axes.axhspan(*cell.ends, color=FAINT, alpha=0.13, linewidth=0, zorder=0.5)
    shifts = side_by_side(len(lines)) if axis.categories else [0.0] * len(lines)
    for (name, members), shift in zip(lines.items(), shifts, strict=True):
        line = sorted(members, key=axis.at)
        x, y = [axis.at(cell) + shift for cell in line], [cell.score or 0.0 for cell in line]
        low, high = zip(*(cell.ends or (score, score) for cell, score in zip(line, y, strict=True)), strict=True)
        axes.vlines(x, low, high, looks[name].colour, lw=0.9, alpha=0.5)
        axes.plot(x, y, label=name, zorder=3, **looks[name].plot)
    if axis.categories:
        many = len(axis.categories)
        axes.set_xlim(-0.5, many - 0.5)
        axes.set_xticks(range(many), axis.categories, rotation=45 if many > 6 else 0)
        axes.grid(axis="x", visible=False)
    else:
        sizes = [axis.at(cell) for members in lines.values() for cell in members]
        by_factors(axes, (min(sizes), max(sizes)))
        pad = (max(sizes) / min(sizes)) ** 0.06 if max(sizes) > min(sizes) else 1.5
        axes.set_xlim(min(sizes) / pad, max(sizes) * pad)
    ends = [v for c in panel.cells for v in (c.score, c.score_low, c.score_high) if v is not None]
    unit = not paper.free_y and min(ends) >= 0 and max(ends) <= 1
    bottom, top = (0.0, 1.0) if unit else (min(ends), max(ends))
    edge = 0.04 * (top - bottom) or 0.1
    axes.set_ylim(bottom - edge, top + edge)

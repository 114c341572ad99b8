"""Figures of the score, or of the divergence from full, against the budget, and against the bytes held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures.panels import Panel, notes, panels_of, several_models
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import FAINT, Look, by_factors, byte_unit, shown, side_by_side, with_intervals
from kvbench.results.result import Result

Measure = Literal["score", "KL"]
TITLES = {"score": "Score", "KL": "Divergence from full"}
LABELS = {"score": "score", "KL": "KL from full, nats per token"}
NAMES = {"score": "", "KL": "kl-"}
ALONE, AMONG = (6.0, 4.5), (3.1, 2.6)  # inches: a single panel, and one of several
NEAR = 5.0  # points: markers that are nearer hide each other
EDGE = 12.0  # points between the outermost markers and the edge of a panel


@dataclass(frozen=True)
class Axis:
    """The horizontal axis, which is logarithmic: its label, the coordinate of a result, and the labelled budgets."""

    label: str
    at: Callable[[Result], float]
    budgets: Mapping[float, str] = field(default_factory=dict)

    def has(self, row: Result) -> bool:
        """Whether a result is a point on the axis; the full cache is a level instead."""
        drawn = row.value is not None and (row.measure == "score" or row.value > 0)  # the axis of KL is logarithmic
        return drawn and not row.is_full and bool(row.budget if self.budgets else row.cache_bytes)

    def is_level(self, row: Result) -> bool:
        """Whether a result is a horizontal line: the full cache, and on a budget axis a policy without budget."""
        drawn = row.value is not None and (row.measure == "score" or row.value > 0)  # the axis of KL is logarithmic
        return drawn and (row.is_full or (bool(self.budgets) and row.budget is None))


def against_budget(
    rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper, measure: Measure = "score"
) -> list[tuple[str, Figure]]:
    """One figure for budgets in tokens, and one for budgets that are shares of the prompt."""
    found = []
    rows = [row for row in rows if row.measure == measure]
    for share in (False, True):
        of_kind = [row for row in rows if row.budget is None or isinstance(row.budget, float) == share]
        if any(row.budget is not None and row.value is not None for row in of_kind):
            figure = _figure(f"{TITLES[measure]} against the budget", of_kind, looks, _budget_axis, paper, [])
            found.append((f"{NAMES[measure]}budget{'-share' * share}", figure))
    return found


def _budget_axis(rows: Sequence[Result]) -> Axis:
    budgets = sorted({c.budget for c in rows if c.budget is not None and c.value is not None})
    share = any(isinstance(budget, float) for budget in budgets)
    label = "budget (share of the prompt)" if share else "budget (tokens per KV head and layer)"
    names = {float(budget): f"{100 * budget:.3g}%" if share else f"{budget:g}" for budget in budgets}
    return Axis(label, lambda row: float(row.budget or 0), names)


def against_bytes(
    rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper, measure: Measure = "score"
) -> list[tuple[str, Figure]]:
    """Score or KL against the mean bytes that an example's cache held at its end, without reserved but unused bytes."""
    rows = [row for row in rows if row.measure == measure]
    if not any(row.cache_bytes and row.value is not None and not row.is_full for row in rows):
        return []
    full = []
    for row in rows:
        if row.is_full and row.value is not None:
            unit, size = byte_unit(row.cache_bytes or 0)
            full.append(
                f"{paper.name(row.line)} on {paper.task(row.task_label)}: {(row.cache_bytes or 0) / size:.4g} {unit}"
            )
    below = [f"Not on the axis: {'; '.join(full)}."] if full else []
    below.append("Cache held: keys, values, positions and statistics, without unused capacity.")
    figure = _figure(f"{TITLES[measure]} against the bytes held", rows, looks, _byte_axis, paper, below)
    return [(f"{NAMES[measure]}bytes", figure)]


def _byte_axis(rows: Sequence[Result]) -> Axis:
    unit, size = byte_unit(min((row.cache_bytes for row in rows if row.cache_bytes), default=1.0))
    return Axis(f"cache held per example ({unit})", lambda row: (row.cache_bytes or 0) / size)


def _figure(
    title: str,
    rows: Sequence[Result],
    looks: Mapping[str, Look],
    axis_of: Callable[[Sequence[Result]], Axis],
    paper: Paper,
    below: Sequence[str],
) -> Figure:
    axes_of = [(panel, axis_of(panel.rows)) for panel in panels_of(rows)]
    panels = [(panel, axis) for panel, axis in axes_of if any(map(axis.has, panel.rows))]
    sheet = Sheet(len(panels), 3, *(ALONE if len(panels) == 1 else AMONG), paper)
    beside = False
    several = several_models(panel for panel, _ in panels)
    for index, ((panel, axis), axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        beside = _draw(axes, panel, axis, looks, paper) or beside
        sheet.set_title(axes, panel.title(paper, several))
        if sheet.is_bottom(index):
            axes.set_xlabel(axis.label)
        if sheet.is_left(index):
            label = LABELS[rows[0].measure]
            axes.set_ylabel(f"{label} (mean over examples)" if len(panels) == 1 else label)
    found = [row for panel, _ in panels for row in panel.rows]
    if {row.compress for row in found if row.evicts} == {"context"}:
        title += ", compressed before the question"
    levels = [row for panel, axis in panels for row in filter(axis.is_level, panel.rows)]
    band = ", and the grey band of the full cache" * any(row.is_full and row.ends for row in levels)
    words = f"Bars{band}: 95% intervals.{' Markers beside each other have (almost) the same x.' * beside}"
    return sheet.finish(title, [*notes(found, words), *below])


def _draw(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look], paper: Paper) -> bool:
    """Draws one line with 95% intervals for every policy, and the levels; returns whether markers are shifted."""
    lines: dict[str, list[Result]] = {}
    for row in panel.rows:
        if axis.has(row):
            lines.setdefault(row.line, []).append(row)
    for row in filter(axis.is_level, panel.rows):
        look = looks[row.line]
        axes.axhline(row.value or 0, color=look.colour, linestyle=look.line, linewidth=1.2, label=row.line, zorder=3)
        if row.is_full and row.ends is not None:
            axes.axhspan(*row.ends, color=shown(FAINT), alpha=0.13, linewidth=0, zorder=0.5)
    sizes = [axis.at(row) for members in lines.values() for row in members]
    least, most = min(sizes), max(sizes)
    least, most = (least / 1.4, 1.4 * most) if most < 1.1 * least else (least, most)
    by_factors(axes, (least, most))
    axes.set_xlim(least, most)
    if axis.budgets:
        axes.set_xticks(list(axis.budgets), list(axis.budgets.values()), rotation=45 if len(axis.budgets) > 6 else 0)
    shifts = side_by_side(len(lines), _room(axes, [[axis.at(row) for row in line] for line in lines.values()]))
    edge = 1 / (1 - 2 * min((max(shifts) + EDGE) / _points_wide(axes), 0.4))
    pad = (most / least) ** ((edge - 1) / 2)  # room for the outermost markers
    axes.set_xlim(least / pad, most * pad)
    for (name, members), shift in zip(lines.items(), shifts, strict=True):
        line = sorted(members, key=axis.at)
        x, y = [axis.at(row) for row in line], [row.value or 0.0 for row in line]
        low, high = zip(*(row.ends or (score, score) for row, score in zip(line, y, strict=True)), strict=True)
        with_intervals(axes, x, y, (low, high), {"label": name, **looks[name].plot}, shift)
    _set_values(axes, panel, paper)
    return any(shifts)


def _room(axes: Axes, lines: Sequence[Sequence[float]]) -> float:
    """Points between neighbouring places with several markers; 0 if no lines have markers at the same place."""
    (low, high), wide = axes.get_xlim(), _points_wide(axes)
    points = [[wide * log(x / low) / log(high / low) for x in line] for line in lines]
    places = sorted((at, number) for number, line in enumerate(points) for at in line)
    groups = [[places[0]]]
    for place in places[1:]:
        if place[0] - groups[-1][-1][0] < NEAR:
            groups[-1].append(place)
        else:
            groups.append([place])
    if all(len({number for _, number in group}) == 1 for group in groups):
        return 0.0
    gaps = [after[0][0] - before[-1][0] for before, after in pairwise(groups)]
    return min([*gaps, wide])


def _points_wide(axes: Axes) -> float:
    """The width of a panel in points."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return float(72 * axes.get_window_extent().width / figure.dpi)


def _set_values(axes: Axes, panel: Panel, paper: Paper) -> None:
    """The limits and ticks of the y axis."""
    if panel.rows[0].measure == "KL":
        _logarithmic(axes, [v for row in panel.rows for v in (row.value, *(row.ends or ())) if v is not None and v > 0])
        return
    ends = [v for c in panel.rows for v in (c.score, c.score_low, c.score_high) if v is not None]
    unit = not paper.free_y and min(ends) >= 0 and max(ends) <= 1
    bottom, top = (0.0, 1.0) if unit else (min(ends), max(ends))
    edge = 0.04 * (top - bottom) or 0.1
    axes.set_ylim(bottom - edge, top + edge)


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with room for all values; it stays linear if none is above 0."""
    if values:
        by_factors(axes, (min(values), max(values)), "y")
        axes.set_ylim(min(values) / 1.5, 1.5 * max(values))

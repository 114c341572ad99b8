"""The picture of every paper: score against the budget, and against the bytes really held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbench.report.figures import places
from kvbench.report.figures.measured import Measured, Panel, panels_of
from kvbench.report.figures.places import Move, Name, Spot
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.sheet import Sheet, legend_of
from kvbench.report.figures.style import FAINT, POINT, Look, byte_unit

SCORE = "score (mean over examples)"
ALONE, AMONG = (5.2, 3.9), (2.75, 2.1)  # inches: a panel by itself, and one of several
MARGIN = 26.0  # points from the first and the last budget to the edges, for lines that are moved sideways
FIFTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
TICK = 0.4  # inches that a tick's number takes


@dataclass(frozen=True)
class Axis:
    """What stands below: its words, how a cell has it, and whether its values are a few given ones (budgets)."""

    words: str
    of: Callable[[Measured], float]
    listed: bool
    share: bool = False


@dataclass(frozen=True)
class Frame:
    """The limits of a panel and its size, enough to know where on the paper a cell is drawn."""

    axis: Axis
    x: tuple[float, float]
    y: tuple[float, float]
    size: tuple[float, float]  # inches

    def spot(self, cell: Measured) -> Spot:
        """Where a cell is drawn."""
        below, above = cell.sides
        across = log2(self.axis.of(cell) / self.x[0]) / log2(self.x[1] / self.x[0])
        return Spot(across * self.size[0] / POINT, self.up(cell.y), self.up(cell.y - below), self.up(cell.y + above))

    def up(self, score: float) -> float:
        """Points from the bottom of the panel."""
        return (score - self.y[0]) / (self.y[1] - self.y[0]) * self.size[1] / POINT


def against_budget(cells: Sequence[Measured], looks: Mapping[str, Look]) -> list[tuple[str, Figure]]:
    """One picture for budgets in tokens, one for budgets that are shares of the prompt; none where there are none."""
    found = []
    for share in (False, True):
        of_kind = [cell for cell in cells if cell.budget is None or isinstance(cell.budget, float) == share]
        if any(cell.budget is not None and cell.score is not None for cell in of_kind):
            name = "budget-share" if share else "budget"
            found.append((name, _picture("Score against the budget", of_kind, looks, _budget_axis)))
    return found


def _budget_axis(panel: Panel) -> Axis:
    share = any(isinstance(cell.budget, float) for cell in panel.cells)
    words = "budget (share of the prompt)" if share else "budget (tokens per KV head and layer)"
    return Axis(words, lambda cell: float(cell.budget or 0), listed=True, share=share)


def against_bytes(cells: Sequence[Measured], looks: Mapping[str, Look]) -> list[tuple[str, Figure]]:
    """Score against the mean bytes that an example's cache held at its end, all but room to spare."""
    held = [cell for cell in cells if cell.held and cell.score is not None]
    if not any(not cell.is_full for cell in held):
        return []
    return [("bytes", _picture("Score against the bytes really held", [*cells], looks, byte_axis))]


def byte_axis(panel: Panel) -> Axis:
    """Bytes held, in a unit that suits the panel."""
    unit, size = byte_unit(min((cell.held for cell in panel.cells if cell.held), default=1.0))
    words = f"cache held per example ({unit}: keys, values, positions, statistics, no spare room)"
    return Axis(words, lambda cell: (cell.held or 0) / size, listed=False)


def _picture(
    title: str, cells: Sequence[Measured], looks: Mapping[str, Look], axis_of: Callable[[Panel], Axis]
) -> Figure:
    panels = [panel for panel in panels_of(cells) if _lines_of(panel, axis_of(panel))]
    alone = len(panels) == 1
    size = ALONE if alone else AMONG
    sheet = Sheet(len(panels), min(3, len(panels)), *size)
    several_models = len({panel.model for panel in panels}) > 1
    moved = False
    for index, (panel, axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        axis = axis_of(panel)
        names, dodged = _draw(axes, panel, axis, looks, size)
        moved |= dodged
        axes.set_title(f"{panel.task}, {panel.model}" if several_models else panel.task, loc="left")
        if sheet.is_bottom(index):
            axes.set_xlabel(axis.words if alone else axis.words.partition(":")[0] + ")" * (":" in axis.words))
        axes.set_ylabel(SCORE if alone else "score") if sheet.is_left(index) else axes.tick_params(labelleft=False)
    shown = [cell for panel in panels for cell in panel.cells]
    banded = any(cell.is_full and cell.low is not None for cell in shown)
    said = notes(shown, f"Bars{', and the grey band of the full cache' if banded else ''}: 95% intervals.")
    if moved:
        said[0] += " Points that would cover each other are moved a little aside."
    if alone and places.fit_beside(len(names), size[1]):
        written = places.beside(sheet.axes[0], names, size[1])
        return sheet.finish(title, said, right=places.room_for(written))
    return sheet.finish(title, said, legend_of(sheet.axes))


def _lines_of(panel: Panel, axis: Axis) -> dict[str, list[Measured]]:
    """What is drawn as points: each policy's scored cells that have a place on the axis."""
    found = {}
    for policy, line in panel.lines.items():
        placed = [
            c for c in line if c.score is not None and not c.is_full and (c.held if not axis.listed else c.budget)
        ]
        if placed:
            found[policy] = sorted(placed, key=axis.of)
    return found


def _draw(
    axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look], size: tuple[float, float]
) -> tuple[list[Name], bool]:
    """Draw a panel; returns the names of its lines, and whether any was moved aside."""
    lines = _lines_of(panel, axis)
    frame = frame_for(axes, [cell for line in lines.values() for cell in line], axis, panel, size)
    levels = [frame.up(cell.y) for cell in _level_cells(panel, axis)]
    moves = places.dodges([[frame.spot(cell) for cell in line] for line in lines.values()], _room(lines, frame), levels)
    names = _levels(axes, panel, axis, looks)
    for (policy, line), move in zip(lines.items(), moves, strict=True):
        points(axes, line, axis, looks[policy], policy, move)
        last = line[-1]
        names.append(Name(policy, looks[policy], axis.of(last), last.y, move))
    return names, any(move != Move() for move in moves)


def points(axes: Axes, line: Sequence[Measured], axis: Axis, look: Look, label: str, move: Move) -> None:
    """One policy's line with the bars of its 95% intervals."""
    x, y = [axis.of(cell) for cell in line], [cell.y for cell in line]
    where = places.shifted(axes, move)
    below, above = zip(*(cell.sides for cell in line), strict=True)
    bars: dict[str, Any] = {"fmt": "none", "ecolor": look.colour, "elinewidth": 0.9, "alpha": 0.5, "transform": where}
    axes.errorbar(x, y, [below, above], **bars)
    axes.plot(x, y, label=label, transform=where, zorder=3, **look.plot)
    axes.plot(x, y, linestyle="none", gid="above", transform=where, zorder=4, **look.points)  # no line covers a point


def _level_cells(panel: Panel, axis: Axis) -> list[Measured]:
    """What has no place on the axis: the full cache, and on budgets whatever has none."""
    return [c for c in panel.cells if c.score is not None and (c.is_full or (axis.listed and c.budget is None))]


def _levels(axes: Axes, panel: Panel, axis: Axis, looks: Mapping[str, Look]) -> list[Name]:
    """Horizontal lines of what has no place on the axis, the interval of the full cache as a band."""
    names = []
    for cell in _level_cells(panel, axis):
        look = looks[cell.policy]
        axes.axhline(cell.y, color=look.colour, linestyle=look.line, linewidth=1.2, label=cell.policy, zorder=3.5)
        if cell.is_full and cell.low is not None and cell.high is not None:
            axes.axhspan(cell.low, cell.high, color=FAINT, alpha=0.13, linewidth=0, zorder=0.5)
        words = f"{cell.policy}, {_amount(cell.held)}" if cell.held else cell.policy
        names.append(Name(words, look, axes.get_xlim()[1], cell.y))
    return names


def _amount(held: float) -> str:
    unit, size = byte_unit(held)
    return f"{held / size:.4g} {unit}" if held / size < 1000 else f"{held / size:.0f} {unit}"


def _room(lines: Mapping[str, Sequence[Measured]], frame: Frame) -> float:
    """How far lines that cover each other may spread: to three fifths of the way to the next budget."""
    if not frame.axis.listed:
        return 26.0
    across = sorted({frame.spot(cell).x for line in lines.values() for cell in line})
    gaps = [b - a for a, b in pairwise(across)]
    return 0.6 * min(gaps, default=60.0)


def frame_for(axes: Axes, cells: Sequence[Measured], axis: Axis, panel: Panel, size: tuple[float, float]) -> Frame:
    """Set limits and ticks so that everything is inside."""
    values = sorted({axis.of(cell) for cell in cells})
    margin = (MARGIN if axis.listed else MARGIN * 0.7) * POINT / size[0]
    pad = (values[-1] / values[0]) ** (margin / (1 - 2 * margin)) if values[-1] > values[0] else 1.5
    ends = [v for c in panel.cells for v in (c.score, c.low, c.high) if v is not None]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
    edge = places.EDGE * POINT / size[1] * (high - low)
    frame = Frame(axis, (values[0] / pad, values[-1] * pad), (low - edge, high + edge), size)
    axes.set_xscale("log", base=2 if axis.listed else 10)
    axes.set_xlim(frame.x)
    axes.set_ylim(frame.y)
    if (low, high) == (0.0, 1.0):
        axes.set_yticks(FIFTHS)
    (_budget_ticks if axis.listed else _byte_ticks)(axes, values, axis, size[0])
    return frame


def _budget_ticks(axes: Axes, values: Sequence[float], axis: Axis, width: float) -> None:
    """The budgets themselves, leaving out those that would run into their neighbours."""
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(values), [f"{100 * v:.3g}%" if axis.share else f"{v:g}" for v in values])
    low, high = axes.get_xlim()
    free = -1.0
    for value, label in zip(values, axes.get_xticklabels(), strict=True):
        middle, half = log2(value / low) / log2(high / low) * width, 0.04 * len(label.get_text()) + 0.03
        label.set_visible(middle - half >= free)
        free = middle + half if label.get_visible() else free


def _byte_ticks(axes: Axes, values: Sequence[float], axis: Axis, width: float) -> None:
    """As many round numbers as there is room for."""
    low, high = axes.get_xlim()
    tenths = [[n / 10 for n in range(10, 100, step)] for step in (1, 2, 5)] if high < 2 * low else []
    for subs in (*tenths, (1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [sub * 10**power for power in range(-3, 13) for sub in subs if low <= sub * 10**power <= high]
        if all(log2(b / a) / log2(high / low) * width >= TICK for a, b in pairwise(ticks)):
            break
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])

"""Who is best for their bytes: every policy and budget, and the front of those that none beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.analysis.result import Result
from kvbench.report.figures.panels import Panel, height, panels_of, sides
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.score import (
    ALONE,
    BYTES,
    RINGS,
    SCORE,
    Axis,
    byte_axis,
    covering,
    mark,
    set_bytes,
    set_scores,
)
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import Look

FULL_MARKER = "*"  # the full cache is a line elsewhere


def front(cells: Sequence[Result]) -> list[Result]:
    """The cells that none beats: no other scores at least as high with fewer bytes, nor higher with as many.

    By the means alone, from few to many bytes.
    """
    best: list[Result] = []
    for cell in sorted(cells, key=lambda c: (c.cache_bytes or 0, -(c.score or 0))):
        if not best or (cell.score or 0) > (best[-1].score or 0):
            best.append(cell)
    return best


def pareto(cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None) -> list[tuple[str, Figure]]:
    """Every policy and budget by bytes and score, with the Pareto front; a picture per panel."""
    found = []
    for panel in panels_of(cells):
        placed = [cell for cell in panel.cells if cell.cache_bytes and cell.score is not None]
        if len(placed) > 1:
            found.append((f"pareto-{panel.task}-{panel.model}", _pareto(panel, placed, looks, paper or Paper())))
    return [("pareto", found[0][1])] if len(found) == 1 else found


def _pareto(panel: Panel, cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper) -> Figure:
    axis, best = byte_axis(panel.cells), front(cells)
    sheet = Sheet(1, 1, *ALONE, paper)
    (axes,) = sheet.axes
    set_scores(axes, panel)
    set_bytes(axes, [axis.at(cell) for cell in cells])
    # The step goes on to the right edge, because more bytes need not score less.
    steps = [*[(axis.at(c), height(c)) for c in best], (axes.get_xlim()[1], height(best[-1]))]
    axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color="#a0a0a0", linewidth=1.2, gid="front")
    order = sorted(cells, key=lambda cell: any(_ties(cell, one) for one in best))  # the front above the others
    points = [(axis.at(cell), height(cell)) for cell in order]
    covered = [covering(point, [[other] for other in points[i + 1 :]]) for i, point in enumerate(points)]
    for cell, count in zip(order, covered, strict=True):
        _dot(axes, cell, axis, looks[cell.line], any(_ties(cell, one) for one in best), count)
    sheet.set_title(axes, panel.task)
    axes.set(xlabel=axis.words, ylabel=SCORE)
    said = notes(cells, RINGS.strip() * any(covered))
    said[1:1] = [
        "Filled, with the bar of the 95% interval: on the front, where none scores as much with less.",
        "The front is that of the means: neighbours whose bars overlap may change places with other examples.",
    ]
    rest = {c.line: looks[c.line] for c in cells}
    handles = [axes.plot([], [], label=p, linestyle="none", **_style(look))[0] for p, look in rest.items()]
    said += [f"On the front: {'; '.join(_names_on(best, cells))}.", BYTES]
    return sheet.finish("Score against bytes: the front", said, (handles, list(rest)))


def _names_on(best: Sequence[Result], cells: Sequence[Result]) -> list[str]:
    """For every step of the front, all that stand on it."""
    return [" = ".join(_at(cell) for cell in cells if _ties(cell, one)) for one in best]


def _ties(one: Result, other: Result) -> bool:
    return (one.cache_bytes, one.score) == (other.cache_bytes, other.score)


def _at(cell: Result) -> str:
    if cell.budget is None:
        return cell.line
    return f"{cell.line}, {cell.budget}" if isinstance(cell.budget, int) else f"{cell.line}, {100 * cell.budget:g}%"


def _style(look: Look) -> dict[str, Any]:
    return {**look.points, "marker": look.marker or FULL_MARKER}


def _dot(axes: Axes, cell: Result, axis: Axis, look: Look, best: bool, covered: int) -> None:
    point, style = (axis.at(cell), height(cell)), _style(look)
    if best:
        below, above = sides(cell)
        axes.errorbar(*point, [[below], [above]], fmt="none", ecolor=look.colour, elinewidth=1.4, alpha=0.7)
    else:
        style |= {"markerfacecolor": "white", "alpha": 0.6}
    mark(axes, point, style, covered, "dot", 4 if best else 2)

"""Who is best for their bytes: every policy and budget, and the front of those that none beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures import places
from kvbench.report.figures.measured import Measured, Panel, panels_of
from kvbench.report.figures.places import Move, Name
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.score import ALONE, SCORE, Axis, byte_axis, frame_for
from kvbench.report.figures.sheet import Sheet
from kvbench.report.figures.style import Look

FULL_MARKER = "*"  # the full cache is a line elsewhere
MOST_TIES = 2  # names of what stands at one place


def front(cells: Sequence[Measured]) -> list[Measured]:
    """The cells that none beats: no other scores at least as high with fewer bytes, nor higher with as many.

    By the means alone, from few to many bytes.
    """
    best: list[Measured] = []
    for cell in sorted(cells, key=lambda c: (c.held or 0, -(c.score or 0))):
        if not best or (cell.score or 0) > (best[-1].score or 0):
            best.append(cell)
    return best


def pareto(cells: Sequence[Measured], looks: Mapping[str, Look]) -> list[tuple[str, Figure]]:
    """Every policy and budget by bytes and score, with the front of those that none beats; a picture per panel."""
    found = []
    for panel in panels_of(cells):
        placed = [cell for cell in panel.cells if cell.held and cell.score is not None]
        if len(placed) > 1:
            found.append((f"pareto-{panel.task}-{panel.model}", _pareto(panel, placed, looks)))
    return [("pareto", found[0][1])] if len(found) == 1 else found


def _pareto(panel: Panel, cells: Sequence[Measured], looks: Mapping[str, Look]) -> Figure:
    sheet, axis, best = Sheet(1, 1, *ALONE), byte_axis(panel), front(cells)
    (axes,) = sheet.axes
    frame = frame_for(axes, cells, axis, panel, ALONE)
    # The step goes on to the right edge, because more bytes need not score less.
    steps = [*[(axis.of(c), c.y) for c in best], (frame.x[1], best[-1].y)]
    axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color="#a0a0a0", linewidth=1.2, gid="front")
    spots = [frame.spot(replace(cell, low=None, high=None)) for cell in cells]
    moves = places.dodges([[spot] for spot in spots])
    for cell, move in zip(cells, moves, strict=True):
        _dot(axes, cell, axis, looks[cell.policy], any(_ties(cell, one) for one in best), move)
    names = _names_on(best, cells, axis, looks)
    axes.set_title(panel.task, loc="left")
    axes.set_xlabel(axis.words)
    axes.set_ylabel(SCORE)
    said = notes(cells, "")
    said[1:1] = [
        "Filled and named: on the front, where none scores as much with less, with the bar of the 95% interval.",
        "The front is that of the means: neighbours whose bars overlap may change places with other examples.",
    ]
    if any(move != Move() for move in moves):
        said[0] += " Points that would cover each other are moved a little aside."
    title = "Score against bytes: the front"
    rest = {c.policy: looks[c.policy] for c in cells}
    handles = [axes.plot([], [], label=p, linestyle="none", **_hollow(look))[0] for p, look in rest.items()]
    if not places.fit_beside(len(names), ALONE[1]):
        return sheet.finish(title, [*said, "On the front: " + "; ".join(n.words for n in names)], (handles, list(rest)))
    written = places.beside(axes, names, ALONE[1])
    return sheet.finish(title, said, (handles, list(rest)), right=places.room_for(written))


def _names_on(best: Sequence[Measured], cells: Sequence[Measured], axis: Axis, looks: Mapping[str, Look]) -> list[Name]:
    """One name for every step of the front, with all that stand on it."""
    found = []
    for one in best:
        ties = [_at(cell) for cell in cells if _ties(cell, one)]
        words = " = ".join(ties[:MOST_TIES]) + (f" and {len(ties) - MOST_TIES} more" if len(ties) > MOST_TIES else "")
        found.append(Name(words, looks[one.policy], axis.of(one), one.y))
    return found


def _ties(one: Measured, other: Measured) -> bool:
    return (one.held, one.score) == (other.held, other.score)


def _at(cell: Measured) -> str:
    if cell.budget is None:
        return cell.policy
    return f"{cell.policy}, {cell.budget}" if isinstance(cell.budget, int) else f"{cell.policy}, {100 * cell.budget:g}%"


def _hollow(look: Look) -> dict[str, Any]:
    return {**look.points, "marker": look.marker or FULL_MARKER, "markerfacecolor": "white"}


def _dot(axes: Axes, cell: Measured, axis: Axis, look: Look, best: bool, move: Move) -> None:
    style = {
        **look.points,
        "marker": look.marker or FULL_MARKER,
        "linestyle": "none",
        "transform": places.shifted(axes, move),
    }
    if best:
        below, above = cell.sides
        bars: dict[str, Any] = {
            "fmt": "none",
            "ecolor": look.colour,
            "elinewidth": 1.4,
            "alpha": 0.7,
            "transform": style["transform"],
        }
        axes.errorbar([axis.of(cell)], [cell.y], [[below], [above]], **bars)
    else:
        style |= {"markerfacecolor": "white", "alpha": 0.6}
    axes.plot([axis.of(cell)], [cell.y], zorder=4 if best else 2, gid="dot", **style)

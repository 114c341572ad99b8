"""The picture of a needle test: a cell for every length and depth, a map for every policy and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.analysis.result import Result
from kvbench.records.sample import Sample
from kvbench.report.figures.panels import Panel, height, panels_of
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.sheet import Gaps, Paper, Sheet, inches_wide
from kvbench.report.figures.style import HEAT, INK, POINT, Look
from kvbench.tasks.needlebench.summary import averaged, cells_of_answers

Cells = Mapping[tuple[float, float], float]  # by length in tokens and depth in percent: a score from 0 to 1
ABSENT = "#ffffff"
NUMBER = 6.5  # points
COLUMNS = 4
LEAST = 0.75  # inches of a map


def needle_maps(cells: Sequence[Result], _: Mapping[str, Look], paper: Paper | None = None) -> list[tuple[str, Figure]]:
    """A picture per task and model whose examples have a length and a depth."""
    found = []
    for panel in panels_of(cells):
        maps = {cell: grid for cell in panel.cells if (grid := grid_of(cell.samples))}
        if any(len({depth for _, depth in grid}) > 1 for grid in maps.values()):
            found.append((f"heatmap-{panel.task}-{panel.model}", _picture(panel, maps, paper or Paper())))
    return [("heatmap", found[0][1])] if len(found) == 1 else found


def grid_of(samples: Sequence[Sample]) -> dict[tuple[float, float], float]:
    """Mean score of every (length, depth in percent) among the samples that have both; nothing where one failed.

    NeedleBench's cells are averaged over its categories with the weights of its paper.
    """
    if any(sample.error is not None for sample in samples):
        return {}
    if samples and all(sample.metadata.get("benchmark") == "needlebench" for sample in samples):
        return {(n, depth): score / 100 for (n, depth), score in averaged(cells_of_answers(samples)).items()}
    members: dict[tuple[float, float], list[float]] = {}
    for sample in samples:
        length, depth = sample.metadata.get("length"), sample.metadata.get("depth")
        if length is not None and depth is not None and sample.score is not None:
            members.setdefault((float(length), float(depth)), []).append(sample.score)
    share = all(depth <= 1 for _, depth in members)
    return {(length, depth * 100 if share else depth): fmean(scores) for (length, depth), scores in members.items()}


def _picture(panel: Panel, maps: Mapping[Result, Cells], paper: Paper) -> Figure:
    lengths, depths = (sorted({cell[axis] for grid in maps.values() for cell in grid}) for axis in (0, 1))
    if len(lengths) == 1:
        return _strips(panel, maps, depths, lengths[0], paper)
    titles = [_title(cell) for cell in maps]
    gaps = Gaps(left=0.55, right=0.75, across=0.2, down=0.35, bottom=0.62)
    least = max(LEAST, inches_wide(" ".join(titles).split(), 8))  # titles are broken between words
    most = paper.columns(COLUMNS, gaps, least)
    size = max(0.3 * len(lengths), inches_wide(titles, 8)), max(0.15 * len(depths), 1.1)
    budgets = {cell.budget for cell in maps if cell.budget is not None}
    together = len(budgets) if 1 < len(budgets) <= most else 1  # maps of one policy, side by side
    columns = most // together * together if len(maps) > most else max(together, len(maps))
    places = _places(maps, columns, together)
    rows = max(places.values()) // columns + 1
    sheet = Sheet(rows * columns, columns, *size, gaps, paper, least, in_shape=False)
    for cell, grid in maps.items():
        axes = sheet.axes[places[cell]]
        axes.set_title(_title(cell), loc="left", fontsize=8)
        _map(axes, grid, lengths, depths, sheet)
    used = set(places.values())
    for index, axes in enumerate(sheet.axes):
        if index not in used:
            axes.set_axis_off()
            continue
        bottom = index + columns not in used
        _ticks(axes.set_xticks, [_tokens(length) for length in lengths] if bottom else [""] * len(lengths))
        left = sheet.is_left(index) or index - 1 not in used
        _ticks(axes.set_yticks, [f"{depth:.3g}" for depth in depths] if left else [""] * len(depths))
        axes.tick_params(axis="x", labelrotation=60)
        axes.set(xlabel="length (tokens)" if bottom else "", ylabel="depth (%)" if sheet.is_left(index) else "")
    return _finished(sheet, panel, maps, "Score by length and depth of the needle", sorted(used)[0])


def _places(maps: Mapping[Result, Cells], columns: int, together: int) -> dict[Result, int]:
    """Where each map goes: a policy's budgets side by side, or, where they are too many, one map after the other."""
    if together == 1:
        return {cell: index for index, cell in enumerate(maps)}
    budgets = sorted({cell.budget for cell in maps if cell.budget is not None})
    policies = list(dict.fromkeys(cell.line for cell in maps))
    return {
        cell: policies.index(cell.line) * together + (0 if cell.budget is None else budgets.index(cell.budget))
        for cell in maps
    }


def _strips(panel: Panel, maps: Mapping[Result, Cells], depths: Sequence[float], length: float, paper: Paper) -> Figure:
    """Prompts of one length: a line for every policy and budget, depths to the right."""
    names = [_title(cell) for cell in maps]
    size = max(0.34 * len(depths), 2.4), 0.2 * len(maps)
    gaps = Gaps(left=0.1 + inches_wide(names, 7), right=0.75, bottom=0.5, top=0.1)
    sheet = Sheet(1, 1, *size, gaps, paper, LEAST, in_shape=False)
    rows = list(range(len(maps)))
    cells: dict[tuple[float, float], float] = {}
    for row, grid in enumerate(maps.values()):
        cells |= {(depth, row): score for (_, depth), score in grid.items()}
    _map(sheet.axes[0], cells, depths, [float(row) for row in rows], sheet)
    _ticks(sheet.axes[0].set_xticks, [f"{depth:.3g}" for depth in depths])
    sheet.axes[0].set_yticks(rows, names)
    sheet.axes[0].set_xlabel("depth of the needle (%)")
    return _finished(sheet, panel, maps, f"Score by depth of the needle, prompts of {length:g} tokens", 0)


def _finished(sheet: Sheet, panel: Panel, maps: Mapping[Result, Cells], title: str, first: int) -> Figure:
    said = notes(list(maps), "")
    said[0] = said[0].replace("for every point", "for every policy and budget")
    said.insert(1, f"Task: {panel.task}. After each name the budget, and the mean over all examples.")
    lengths, depths = (len({cell[axis] for grid in maps.values() for cell in grid}) for axis in (0, 1))
    if any(len(grid) < lengths * depths for grid in maps.values()):
        said[1] += " White: not asked."
    figure = sheet.finish(title, said)
    image = sheet.axes[first].images[0]
    place = sheet.axes[sheet.columns - 1].get_position() if sheet.rows > 1 else sheet.axes[-1].get_position()
    wide = float(figure.get_size_inches()[0])
    bar = figure.add_axes((place.x1 + 0.12 / wide, place.y0, 0.12 / wide, place.height))
    figure.colorbar(image, cax=bar, label="score")
    bar.grid(visible=False)
    return figure


def _map(axes: Axes, cells: Cells, across: Sequence[float], down: Sequence[float], sheet: Sheet) -> None:
    """Cells by (across, down), with their numbers where these fit."""
    values = np.full((len(down), len(across)), np.nan)
    for (x, y), score in cells.items():
        values[down.index(y), across.index(x)] = score
    colours = colormaps[HEAT].with_extremes(bad=ABSENT)
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=7)
    wide, high = sheet.width / len(across) / POINT, sheet.height / len(down) / POINT
    if wide < 3.2 * NUMBER * 0.6 or high < NUMBER * 1.25:
        return
    for (x, y), score in cells.items():
        words = f"{score:.2f}".removeprefix("0") if 0 < score < 1 else f"{score:.0f}"
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": NUMBER}
        axes.text(across.index(x), down.index(y), words, color=INK if score > 0.5 else "white", **style)


def _ticks(setter: Callable[..., Any], labels: Sequence[str]) -> None:
    """So many labels as can be read: every one, or every second, third, ..."""
    step = -(-len(labels) // 12)
    setter(range(0, len(labels), step), labels[::step])


def _title(cell: Result) -> str:
    """A policy's name, its budget and its score as the tables have it, which cells of few examples count less in."""
    name = cell.line if cell.budget is None else f"{cell.line}, {cell.budget:g}"
    return f"{name}: {height(cell):.2f}"


def _tokens(length: float) -> str:
    return f"{length / 1000:g}k" if length >= 1000 and length % 100 == 0 else f"{length:g}"

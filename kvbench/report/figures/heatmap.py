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
from kvbench.report.figures.sheet import Paper, Sheet, inches_wide
from kvbench.report.figures.style import HEAT, INK, Look
from kvbench.tasks.summary import summary_module

Cells = Mapping[tuple[float, float], float]  # by length in tokens and depth in percent: a score from 0 to 1
ABSENT = "#ffffff"
NUMBER = 6.5  # points
COLUMNS = 4
LEAST = 1.1  # inches of a map


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

    A benchmark's own `heat_map` comes before the mean.
    """
    if any(sample.error is not None for sample in samples):
        return {}
    own = getattr(summary_module(samples), "heat_map", None)
    if own is not None:
        return {(n, depth): score / 100 for (n, depth), score in own(samples).items()}
    members: dict[tuple[float, float], list[float]] = {}
    for sample in samples:
        length, depth = sample.metadata.get("length"), sample.metadata.get("depth")
        if length is not None and depth is not None and sample.score is not None:
            members.setdefault((float(length), float(depth)), []).append(sample.score)
    share = all(depth <= 1 for _, depth in members)
    return {(length, depth * 100 if share else depth): fmean(scores) for (length, depth), scores in members.items()}


def _picture(panel: Panel, maps: Mapping[Result, Cells], paper: Paper) -> Figure:
    """A map for each policy and budget, the full cache last."""
    lengths, depths = (sorted({cell[axis] for grid in maps.values() for cell in grid}) for axis in (0, 1))
    if len(lengths) == 1:
        return _strips(panel, maps, depths, lengths[0], paper)
    budgets = {cell.budget for cell in maps if cell.budget is not None}
    order = sorted(maps, key=lambda cell: cell.budget is None)
    wide = min(2.4, inches_wide([_title(cell) for cell in maps]) + 0.6)
    size = max(0.3 * len(lengths) + 0.4, wide), max(0.15 * len(depths), 1.1) + 0.4
    columns = COLUMNS // max(1, len(budgets)) * len(budgets) or COLUMNS  # the maps of one policy side by side
    sheet = Sheet(len(maps), columns, *size, paper, LEAST, in_shape=False)
    for index, (cell, axes) in enumerate(zip(order, sheet.axes, strict=True)):
        sheet.set_title(axes, _title(cell), size=8, beside=0.6)
        _map(axes, maps[cell], lengths, depths, size)
        bottom, left = sheet.is_bottom(index), sheet.is_left(index)
        _ticks(axes.set_xticks, [_tokens(length) for length in lengths] if bottom else [""] * len(lengths))
        _ticks(axes.set_yticks, [f"{depth:.3g}" for depth in depths] if left else [""] * len(depths))
        axes.tick_params(axis="x", labelrotation=60)
        axes.set(xlabel="length (tokens)" * bottom, ylabel="depth (%)" * left)
    return _finished(sheet, panel, maps, "Score by length and depth of the needle")


def _strips(panel: Panel, maps: Mapping[Result, Cells], depths: Sequence[float], length: float, paper: Paper) -> Figure:
    """Prompts of one length: a line for every policy and budget, depths to the right."""
    names = [_title(cell) for cell in maps]
    beside = inches_wide(names, 7) + 0.8
    size = max(0.34 * len(depths), 2.4) + beside, 0.2 * len(maps) + 0.7
    sheet = Sheet(1, 1, *size, paper, LEAST, beside, in_shape=False)
    cells: dict[tuple[float, float], float] = {}
    for row, grid in enumerate(maps.values()):
        cells |= {(depth, row): score for (_, depth), score in grid.items()}
    _map(sheet.axes[0], cells, depths, [float(row) for row in range(len(maps))], (size[0] - beside + 0.4, size[1]))
    _ticks(sheet.axes[0].set_xticks, [f"{depth:.3g}" for depth in depths])
    sheet.axes[0].set_yticks(range(len(maps)), names)
    sheet.axes[0].set_xlabel("depth of the needle (%)")
    return _finished(sheet, panel, maps, f"Score by depth of the needle, prompts of {length:g} tokens")


def _finished(sheet: Sheet, panel: Panel, maps: Mapping[Result, Cells], title: str) -> Figure:
    said = notes(list(maps), "")
    said[0] = said[0].replace("for every point", "for every policy and budget")
    said.insert(1, f"Task: {panel.task}. After each name the budget, and the mean over all examples.")
    lengths, depths = (len({cell[axis] for grid in maps.values() for cell in grid}) for axis in (0, 1))
    if any(len(grid) < lengths * depths for grid in maps.values()):
        said[1] += " White: not asked."
    bar = sheet.figure.colorbar(
        sheet.axes[0].images[0], ax=sheet.axes, label="score", aspect=12, shrink=min(1.0, 2 / sheet.rows)
    )
    bar.ax.grid(visible=False)
    return sheet.finish(title, said)


def _map(axes: Axes, cells: Cells, across: Sequence[float], down: Sequence[float], size: tuple[float, float]) -> None:
    """Cells by (across, down), with their numbers where these fit. size: inches of the map and its labels."""
    values = np.full((len(down), len(across)), np.nan)
    for (x, y), score in cells.items():
        values[down.index(y), across.index(x)] = score
    colours = colormaps[HEAT].with_extremes(bad=ABSENT)
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=7)
    if (size[0] - 0.4) / len(across) < 0.18 or (size[1] - 0.4) / len(down) < 0.11:
        return
    for (x, y), score in cells.items():
        words = f"{score:.2f}".removeprefix("0") if 0 < score < 1 else f"{score:.0f}"
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": NUMBER}
        axes.text(across.index(x), down.index(y), words, color=INK if score > 0.5 else "white", **style)


def _ticks(setter: Callable[..., Any], labels: Sequence[str]) -> None:
    """At most twelve labels: every one, or every second, third, ..."""
    step = -(-len(labels) // 12)
    setter(range(0, len(labels), step), labels[::step])


def _title(cell: Result) -> str:
    """A policy's name, its budget and its score as the tables have it, which cells of few examples count less in."""
    name = cell.line if cell.budget is None else f"{cell.line}, {cell.budget:g}"
    return f"{name}: {height(cell):.2f}"


def _tokens(length: float) -> str:
    return f"{length / 1000:g}k" if length >= 1000 and length % 100 == 0 else f"{length:g}"

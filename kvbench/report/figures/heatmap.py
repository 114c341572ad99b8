"""Heatmaps of needle tests: score by prompt length and needle depth, one for each policy and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures.panels import notes, panels_of, several_models
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import HEAT, INK, PAPER, Look, shown
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.tasks.scores import summary_module

Cells = Mapping[tuple[float, float], float]  # by length in tokens and depth in percent: a score from 0 to 1


def needle_maps(rows: Sequence[Result], _: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """One figure for each task and model with examples that have a length and a depth."""
    found = []
    panels = panels_of(rows)
    for panel in panels:
        maps = {row: grid for row in panel.rows if (grid := grid_of(row.samples))}
        if any(len({depth for _, depth in grid}) > 1 for grid in maps.values()):
            title = panel.title(paper, several_models(panels))
            found.append((f"heatmap-{panel.task}-{panel.model}", _figure(title, maps, paper)))
    return [("heatmap", found[0][1])] if len(found) == 1 else found


def grid_of(samples: Sequence[Sample]) -> dict[tuple[float, float], float]:
    """Mean score by (length, depth in percent) of the samples that have both; empty if a sample failed.

    If the benchmark has a function `heat_map`, it is used instead of the mean.
    """
    if any(sample.error is not None for sample in samples):
        return {}
    heat_map = getattr(summary_module(samples), "heat_map", None)
    if heat_map is not None:
        return {(n, depth): score / 100 for (n, depth), score in heat_map(samples).items()}
    members: dict[tuple[float, float], list[float]] = {}
    for sample in samples:
        length, depth = sample.metadata.get("length"), sample.metadata.get("depth")
        if length is not None and depth is not None and sample.score is not None:
            members.setdefault((float(length), float(depth)), []).append(sample.score)
    share = all(depth <= 1 for _, depth in members)
    return {(length, depth * 100 if share else depth): fmean(scores) for (length, depth), scores in members.items()}


def _figure(about: str, maps: Mapping[Result, Cells], paper: Paper) -> Figure:
    """One map per run, the full cache last; for a single prompt length, one map with one row per run."""
    lengths, depths = (sorted({place[axis] for grid in maps.values() for place in grid}) for axis in (0, 1))
    order = sorted(maps, key=lambda row: row.budget is None)
    titles = []
    for row in order:
        budget = "" if row.budget is None else f", {row.budget:g}"
        titles.append(paper.name(row.line) + budget + ("" if row.value is None else f": {row.value:.2f}"))
    if len(lengths) == 1:
        wide = 0.065 * max(map(len, titles)) + 0.6  # of the labels
        sheet = Sheet(1, 1, max(0.34 * len(depths), 2.4) + wide, 0.2 * len(maps) + 0.7, paper, 1.4 + wide)
        cells = {(depth, float(at)): s for at, row in enumerate(order) for (_, depth), s in maps[row].items()}
        _map(sheet.axes[0], cells, depths, [float(row) for row in range(len(maps))])
        sheet.axes[0].set_yticks(range(len(maps)), titles)
        _ticks(sheet.axes[0], "x", [f"{depth:.3g}" for depth in depths], "depth of the needle (%)")
        title = f"{about}: score by depth of the needle, prompts of {lengths[0]:g} tokens"
    else:
        title = f"{about}: score by length and depth of the needle"
        sheet = Sheet(len(maps), 4, max(0.3 * len(lengths) + 0.6, 2.2), max(0.15 * len(depths), 1.1) + 0.6, paper)
        for index, (row, axes) in enumerate(zip(order, sheet.axes, strict=True)):
            _map(axes, maps[row], lengths, depths)
            sheet.set_title(axes, titles[index])
            bottom, left = sheet.is_bottom(index), sheet.is_left(index)
            tokens = [f"{n / 1000:g}k" if n >= 1000 and n % 100 == 0 else f"{n:g}" for n in lengths]
            _ticks(axes, "x", [text * bottom for text in tokens], "length (tokens)" * bottom)
            _ticks(axes, "y", [f"{d:.3g}" if left else "" for d in depths], "depth (%)" * left)
            axes.tick_params(axis="x", labelrotation=60)
    wide, high = sheet.figure.get_size_inches()
    tall = min(float(high), 2.2)  # inches of the colour bar
    place = {"fraction": min(0.15, 0.5 / wide), "shrink": tall / high, "aspect": tall / 0.13, "anchor": (0.0, 1.0)}
    bar = sheet.figure.colorbar(sheet.axes[0].images[0], ax=sheet.axes, label="score", **place)
    bar.ax.grid(visible=False)
    return sheet.finish(title, notes(order, "After each name: the budget and the mean over all examples."))


def _map(axes: Axes, cells: Cells, across: Sequence[float], down: Sequence[float]) -> None:
    """A map of cells by (across, down), with numbers if there are few columns; a cell without colour has no example."""
    values = np.full((len(down), len(across)), np.nan)
    for (x, y), score in cells.items():
        values[down.index(y), across.index(x)] = score
    colours = colormaps[HEAT].with_extremes(bad=shown(PAPER))
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for (x, y), score in cells.items() if len(across) <= 12 else ():
        words = f"{score:.2f}".removeprefix("0") if 0 < score < 1 else f"{score:.0f}"
        ink = INK if score > 0.5 else "white"
        axes.text(across.index(x), down.index(y), words, color=ink, ha="center", va="center", fontsize="x-small")


def _ticks(axes: Axes, which: str, labels: Sequence[str], title: str) -> None:
    """At most twelve tick labels: all, or every second, third, ..."""
    step = -(-len(labels) // 12)
    getattr(axes, f"set_{which}ticks")(range(0, len(labels), step), labels[::step])
    getattr(axes, f"set_{which}label")(title)

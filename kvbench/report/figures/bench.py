"""Latency, throughput and memory: what `python -m kvbench.bench` measured, a panel per figure, a line per method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbench.report.figures import charts
from kvbench.report.figures.curves import Chart, Curve, Picture, of_json
from kvbench.report.figures.sheet import Paper, Sheet, by_factors
from kvbench.report.figures.style import Look, looks_of
from kvbench.terminal.errors import UsageError

SIZE = (4.3, 3.4)  # inches of a panel
MARGIN = 1.15  # of the smallest and the largest value
HEADER = 7  # lines under a picture, of which the last say the sizes that were run


def of_file(path: Path, paper: Paper | None = None) -> Figure:
    """The picture of a benchmark's JSON file. UsageError where it has no curves."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        picture = of_json(content)
        header = [str(line) for line in content["header"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no curves that `python -m kvbench.bench` wrote ({error!r})") from error
    if not picture:
        raise UsageError(f"{path} has no curves: nothing was measured at several sizes")
    return draw(picture, header, paper)


def draw(picture: Picture, header: Sequence[str], paper: Paper | None = None) -> Figure:
    """A benchmark's picture. header: the title, then its conditions, of which the first lines are shown."""
    shown = header[:HEADER]
    return charts.draw(picture, shown, paper) if isinstance(picture, Chart) else _panels(picture, shown, paper)


def _panels(curves: Sequence[Curve], header: Sequence[str], paper: Paper | None) -> Figure:
    """One panel for each kind of curve, sizes and values by factors."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    looks = looks_of(list(dict.fromkeys(curve.method for curve in curves)))
    sheet = Sheet(len(panels), 2, *SIZE, paper)
    handles: dict[str, Any] = {}
    for panel, axes in zip(panels, sheet.axes, strict=True):
        members = [curve for curve in curves if curve.panel == panel]
        for curve in members:
            handles.setdefault(curve.method, _line(axes, curve, looks[curve.method]))
            axes.set(xlabel=curve.x_label, ylabel=curve.y_label)
        _log(axes)
    notes = list(header[1:])
    if any(known is not None for curve in curves for known in curve.low):
        notes.append("Bars: 20th to 80th percentile of repeated runs or steps.")
    return sheet.finish(header[0], notes, (list(handles.values()), list(handles)))


def _line(axes: Axes, curve: Curve, look: Look) -> Any:  # noqa: ANN401 - a matplotlib line
    plot = {**look.plot, "marker": look.marker or "."}
    (line,) = axes.plot(curve.x, curve.y, label=curve.method, **plot)
    sides = zip(curve.x, curve.y, curve.low, curve.high, strict=False)
    for x, y, low, high in sides:
        if low is not None and high is not None:
            ends = [min(low, y), max(high, y)]
            axes.plot([x, x], ends, color=look.colour, linewidth=0.9, alpha=0.5, gid="bar")
    return line


def _log(axes: Axes) -> None:
    """Axes by factors, with plain numbers; the values as they are where some are none or negative."""
    axes.set_xscale("log")
    drawn = [np.asarray(line.get_xydata(), dtype=float) for line in axes.get_lines()]
    x, y = np.concatenate(drawn).T
    sizes = sorted(set(x.tolist()))
    axes.set_xlim(sizes[0] / MARGIN, sizes[-1] * MARGIN)
    if y.min() > 0:
        by_factors(axes, "y", (y.min(), y.max()))
        axes.set_ylim(y.min() / MARGIN, y.max() * MARGIN)
    else:  # a reduction in percent may be none, or an increase
        axes.margins(y=0.05)
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())

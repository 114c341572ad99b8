"""What can be read off a figure: its lines, its bars, its words, and what covers what."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvbench.analysis.result import Result
from kvbench.report.figures.panels import looks


def lines_of(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}


def bars_of(axes: Axes) -> list[float]:
    """Lengths of the bars from the top down."""
    bars = [box for box in axes.containers if isinstance(box, BarContainer)]
    return [bar.patches[0].get_width() for bar in bars]


def words_of(figure: Figure) -> list[Text]:
    """All that is written; ticks beyond the ends of their axis are not."""
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [(tick, sorted(axis.get_view_interval())) for axis in axes for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick, (low, high) in ticks if not low <= tick.get_loc() <= high]
    return [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in beyond]  # type: ignore[misc]


def said(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text() for t in figure.texts).split())


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of words that are drawn over each other, and words that leave the paper."""
    figure.canvas.draw()
    texts = words_of(figure)
    words = [text.get_text() for text in texts]
    boxes = np.array([text.get_window_extent().extents for text in texts])  # [words, (x0, y0, x1, y1)] in pixels
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    shared = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    pairs = np.argwhere(np.triu((shared > 1).all(-1), k=1))
    outside = (boxes[:, :2] < 0).any(-1) | (boxes[:, 2:] > figure.get_size_inches() * figure.dpi).any(-1)
    return [(words[i], words[j]) for i, j in pairs] + [(words[i], "the edge") for i in np.flatnonzero(outside)]


def picture(draw: Any, rows: list[Result], *more: Any) -> Figure:
    """The only picture of its kind that these runs make."""
    ((_, figure),) = draw(rows, looks(rows), *more)
    return figure

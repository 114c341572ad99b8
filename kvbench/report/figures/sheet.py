"""A picture of panels: the title above, legend and notes below. matplotlib's constrained layout places the panels."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvbench.report.figures.style import FAINT
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)

TITLE, LABEL, NOTE = 10.5, 8.0, 7.5  # points
LETTER = 0.0084  # inches that a letter takes on average, for each point of its size
EDGE = 0.12  # inches of paper around everything
BESIDE = 0.96  # inches that ticks, labels and edges take
LEAST = 1.3  # inches of the narrowest panel
STEP, TAKEN = 0.1, 0.65  # of the way to the next category: between two lines side by side, and all of them at most

Legend = tuple[Sequence[Any], Sequence[str]]  # handles, labels


@dataclass(frozen=True)
class Paper:
    """What a picture is drawn for.

    width: inches of the whole picture (None: what suits it). caption: whether title and notes are drawn; if not, they
    are logged.
    """

    width: float | None = None
    caption: bool = True


class Sheet:
    """`panels` panels of `width` by `height` inches, labels included, in at most `columns` columns.

    On paper of a given width as many columns are made as fit. least: inches of the narrowest panel; beside: inches
    that labels take beside it; in_shape: whether the height of a panel follows its width.
    """

    def __init__(
        self,
        panels: int,
        columns: int,
        width: float,
        height: float,
        paper: Paper | None = None,
        least: float = LEAST,
        beside: float = BESIDE,
        in_shape: bool = True,
    ) -> None:
        self.paper = paper or Paper()
        self.columns = min(columns, panels)
        total = max(self.columns * width, 4.4)
        if self.paper.width is not None:
            total = self.paper.width
            if total < least + beside:
                raise UsageError(
                    f"--width {total:g} is too narrow for this picture, which needs {least + beside:.1f} inches"
                )
            self.columns = min(self.columns, max(1, int((total - beside) / least)))
        self.rows = -(-panels // self.columns)
        self.panel_width = total / self.columns
        high = height * min(1.0, max(self.panel_width / width, 0.7)) if in_shape else height
        self.figure = Figure(figsize=(total, self.rows * high))
        FigureCanvasAgg(self.figure)
        grid = self.figure.subplots(self.rows, self.columns, squeeze=False).flatten().tolist()
        for unused in grid[panels:]:
            unused.remove()
        self.axes: list[Axes] = grid[:panels]

    def is_left(self, index: int) -> bool:
        """Whether a panel is the first of its row."""
        return index % self.columns == 0

    def is_bottom(self, index: int) -> bool:
        """Whether no panel is below."""
        return index + self.columns >= len(self.axes)

    def set_title(self, axes: Axes, words: str, size: float = 9.0, beside: float = 0.5) -> None:
        """A panel's title, in lines of its width. beside: inches of the panel that labels take."""
        axes.set_title(textwrap.fill(words, _letters(self.panel_width - beside, size)), loc="left", size=size)

    def finish(self, title: str, notes: Sequence[str], legend: Legend | None = None) -> Figure:
        """Add title, legend and notes, make the figure higher by what they take, and return it."""
        if not self.paper.caption:
            log.info("caption: %s. %s", title, " ".join(notes))
            title, notes = "", ()
        wide, high = self.figure.get_size_inches()
        inside = wide - 2 * EDGE
        text = "\n".join(textwrap.fill(note, _letters(1.08 * inside, NOTE), break_on_hyphens=False) for note in notes)
        foot = self.figure.text(EDGE / wide, 0, text, size=NOTE, color=FAINT, linespacing=1.35)
        key = self.figure.legend(*legend, **_in_columns(legend[1], inside)) if legend is not None else None
        foot_high, key_high = (0.0 if not x else _inches_high(x) + EDGE for x in (text and foot, key))
        head = textwrap.fill(title, _letters(1.08 * inside, TITLE))
        above = 0.02 * TITLE * (head.count("\n") + 1) * bool(head) + EDGE
        total = above + high + key_high + foot_high
        self.figure.set_size_inches(wide, total)
        self.figure.text(EDGE / wide, 1 - EDGE / total, head, size=TITLE, va="top")
        foot.set_y(EDGE / total)
        if key is not None:
            key.set_bbox_to_anchor((0.5, (EDGE / 2 + foot_high) / total))
        panels = (0.0, (key_high + foot_high) / total, 1.0, high / total)
        self.figure.set_layout_engine("constrained", rect=panels, w_pad=0.1, h_pad=0.06)
        return self.figure


def _letters(inches: float, size: float) -> int:
    """How many letters of a size stand in a line."""
    return max(12, int(inches / (LETTER * size)))


def _inches_high(words: Any) -> float:  # noqa: ANN401 - a text or a legend
    return float(words.get_window_extent().height) / float(words.get_figure(root=True).dpi)


def _in_columns(labels: Sequence[str], wide: float) -> dict[str, Any]:
    """Arguments of a legend below the panels: as many columns as fit."""
    each = 0.58 + LETTER * LABEL * max(map(len, labels), default=0)
    columns = max(1, min(len(labels), int(wide / each)))
    return {"loc": "lower center", "ncols": columns, "handlelength": 3, "borderaxespad": 0, "columnspacing": 1.6}


def legend_of(panels: Sequence[Axes]) -> Legend:
    """Every line that some panel has, once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def inches_wide(words: Sequence[str], size: float = LABEL) -> float:
    """About the width of the longest of some words."""
    return LETTER * size * max(map(len, words), default=0)


def side_by_side(lines: int) -> list[float]:
    """Where lines stand around a category, so that none covers another: shares of the way to the next, in order."""
    step = min(STEP, TAKEN / max(lines - 1, 1))
    return [step * (place - (lines - 1) / 2) for place in range(lines)]


def by_factors(axes: Axes, which: str, ends: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis ("x" or "y"). ends: the smallest and the largest value."""
    low, high = ends
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    steps = (1, 2, 5) if high < 200 * low else (1,)
    axis.set_major_locator(MaxNLocator(4) if high < 4 * low else LogLocator(10, subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))

"""A page of panels: title above, notes and legend below, each given the room it needs, so that nothing overlaps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvbench.report.figures.style import FAINT, POINT
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)

TITLE, NOTE = 10.5, 7.5  # points
EDGE = 0.12  # inches of paper around everything
LINE = 1.35  # of the size of type
LEAST = 1.3  # inches of a panel


@dataclass(frozen=True)
class Gaps:
    """Inches kept free around and between panels for ticks, labels and titles."""

    left: float = 0.62
    right: float = 0.1
    across: float = 0.3
    down: float = 0.55
    top: float = 0.28
    bottom: float = 0.5


@dataclass(frozen=True)
class Paper:
    """What pictures are drawn for. width: inches of the whole picture (None: what suits it); caption: whether the title
    and the notes stand in it.
    """

    width: float | None = None
    caption: bool = True

    def panel_wide(self, gaps: Gaps, columns: int = 1) -> float:
        """Inches that are left for each panel."""
        if self.width is None:
            return inf
        return (self.width - 2 * EDGE - gaps.left - gaps.right - (columns - 1) * gaps.across) / columns

    def columns(self, wanted: int, gaps: Gaps, least: float = LEAST) -> int:
        """As many columns as are wanted, or as fit with `least` inches for a panel. UsageError where not one fits."""
        fitting = [columns for columns in range(wanted, 0, -1) if self.panel_wide(gaps, columns) >= least]
        if not fitting:
            needs = least + 2 * EDGE + gaps.left + gaps.right
            raise UsageError(f"--width {self.width:g} is too narrow for this picture, which needs {needs:.1f} inches")
        return fitting[0]


class Sheet:
    """Panels of one size, `width` by `height` inches, in `columns` columns; those that are not used are not there.

    On paper of a given width, columns and panels are what fits. least: inches of the narrowest panel; in_shape: whether
    the height follows the width.
    """

    def __init__(
        self,
        panels: int,
        columns: int,
        width: float,
        height: float,
        gaps: Gaps | None = None,
        paper: Paper | None = None,
        least: float = LEAST,
        in_shape: bool = True,
    ) -> None:
        self.gaps, self.paper = gaps or Gaps(), paper or Paper()
        self.columns = self.paper.columns(min(columns, panels), self.gaps, least)
        self.rows = -(-panels // self.columns)
        self.width, self.height = width, height
        if self.paper.width is not None:
            self.width = self.paper.panel_wide(self.gaps, self.columns)
            self.height *= self.width / width if in_shape else 1
        self.figure = Figure(figsize=(4, 4))  # the size it will have is known when all is drawn
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

    @property
    def panels_wide(self) -> float:
        """Inches from the left edge of the first panel to the right edge of the last."""
        return self.columns * self.width + (self.columns - 1) * self.gaps.across

    def finish(
        self,
        title: str,
        notes: Sequence[str],
        legend: tuple[Sequence[Artist], Sequence[str]] | None = None,
    ) -> Figure:
        """Set title, legend and notes, give the figure its size, and return it. A caption left out is logged."""
        gaps = self._gaps_with_words()
        wide = self.paper.width or max(gaps.left + self.panels_wide + gaps.right, 4.2) + 2 * EDGE
        self.figure.set_size_inches(wide, 1.0)
        if not self.paper.caption:
            log.info("caption: %s. %s", title, " ".join(notes))
            title, notes = "", ()
        head = self._text(title, TITLE, wide)
        foot = self._text("\n".join(notes), NOTE, wide)
        key, key_high = self._legend(legend, wide)
        panels_high = self.rows * self.height + (self.rows - 1) * gaps.down
        foot_high, head_high = _inches_high(foot), _inches_high(head)
        bottom = EDGE + foot_high + key_high + gaps.bottom
        high = bottom + panels_high + gaps.top + head_high + EDGE
        self.figure.set_size_inches(wide, high)
        self.figure.subplots_adjust(
            left=(EDGE + gaps.left) / wide,
            right=(EDGE + gaps.left + self.panels_wide) / wide,
            bottom=bottom / high,
            top=(bottom + panels_high) / high,
            wspace=gaps.across / self.width,
            hspace=gaps.down / self.height,
        )
        head.set_position((EDGE / wide, 1 - EDGE / high))
        foot.set_position((EDGE / wide, (EDGE + foot_high) / high))
        if key is not None:
            key.set_bbox_to_anchor((0.0, (EDGE + foot_high) / high, 1.0, key_high / high))  # type: ignore[attr-defined]
        return self.figure

    def _text(self, words: str, size: float, wide: float) -> Text:
        """Left-aligned words, broken into lines that fit."""
        colour = FAINT if size == NOTE else None
        text = self.figure.text(0, 0, "", size=size, va="top", color=colour, linespacing=LINE)
        _fold(text, words, wide - 2 * EDGE)
        return text

    def _gaps_with_words(self) -> Gaps:
        """The gaps, once titles and labels that are wider than their panel are broken into lines."""
        above = below = 0.0
        for axes in self.axes:
            words = axes.get_title("left")
            titles = [x for x in axes.get_children() if isinstance(x, Text) and x.get_text() == words != ""]
            for title in titles:
                above = max(above, _more_lines(title, self.width + self.gaps.across / 2))
            below = max(below, _more_lines(axes.xaxis.label, self.width + self.gaps.across / 2))
        gaps = self.gaps
        return replace(gaps, down=gaps.down + above + below, top=gaps.top + above, bottom=gaps.bottom + below)

    def _legend(self, asked: tuple[Sequence[Artist], Sequence[str]] | None, wide: float) -> tuple[Artist | None, float]:
        """The legend in as many columns as fit, and its height in inches."""
        if asked is None:
            return None, 0.0
        handles, labels = asked
        for columns in range(len(labels), 0, -1):
            legend = self.figure.legend(
                handles, labels, loc="center", ncols=columns, handlelength=3, borderaxespad=0, columnspacing=1.6
            )
            box = legend.get_window_extent()
            if box.width / self.figure.dpi <= wide - 2 * EDGE or columns == 1:
                break
            legend.remove()
        return legend, box.height / self.figure.dpi + 0.06


def _more_lines(text: Text, wide: float) -> float:
    """Break a text into lines of at most so many inches; returns the height of those after the first."""
    _fold(text, text.get_text(), wide)
    return text.get_text().count("\n") * LINE * float(text.get_fontsize()) * POINT


def _fold(text: Text, words: str, wide: float) -> None:
    """Let a text be these words, broken into lines of at most so many inches."""
    figure = text.get_figure(root=True)
    assert figure is not None
    lines: list[str] = []
    for paragraph in words.split("\n"):
        lines.append("")
        for word in paragraph.split():
            longer = f"{lines[-1]} {word}".strip()
            text.set_text(longer)
            inches = text.get_window_extent().width / figure.dpi
            if lines[-1] and inches > 0.98 * wide:
                lines.append(word)
            else:
                lines[-1] = longer
    text.set_text("\n".join(lines))


def legend_of(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Every line that some panel has, once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def inches_wide(words: Sequence[str], size: float) -> float:
    """The width of the longest of some words, in type of `size` points."""
    figure = Figure()
    FigureCanvasAgg(figure)
    return max(figure.text(0, 0, each, size=size).get_window_extent().width for each in words) / figure.dpi


def _inches_high(text: Text) -> float:
    lines = text.get_text().count("\n") + 1 if text.get_text() else 0
    return lines * LINE * float(text.get_fontsize()) * POINT + (0.03 if lines else 0.0)

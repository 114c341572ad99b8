"""The layout of a figure: title, panels (placed by matplotlib's constrained layout), legend and notes."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvbench.errors import UsageError
from kvbench.report.figures.style import FAINT, shown

log = logging.getLogger(__name__)

EDGE = 0.12  # inches of margin
LEAST = 2.1  # inches of the narrowest panel with its labels


@dataclass(frozen=True)
class Paper:
    """Options of a figure.

    width: of the whole figure in inches (None: automatic). caption: draw title and notes, otherwise log them. font,
    font_size: see `style.house_style`. names: new names for the legend, by label. free_y: fit the y axis to the scores
    instead of 0 to 1. common, fields: the words that end all labels of policies, and of tasks; a note has them.
    """

    width: float | None = None
    caption: bool = True
    font: str | None = None
    font_size: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    free_y: bool = False
    common: str = ""
    fields: str = ""

    def name(self, label: str) -> str:
        """The renamed label: `names` may have the whole label, or the policy before the first space."""
        policy, space, rest = label.removesuffix(self.common).partition(" ")
        return self.names.get(label) or self.names.get(policy, policy) + space + rest

    def task(self, label: str) -> str:
        """The label of a task without the fields that all tasks share."""
        return label.removesuffix(self.fields)

    @property
    def notes(self) -> list[str]:
        """What the labels leave out."""
        policies = [f"All policies: {self.common.strip()}."] if self.common else []
        return [*policies, *([f"All tasks: {self.fields.strip('()')}."] if self.fields else [])]


def shared_end(labels: Iterable[str]) -> str:
    """The words that all labels end with, besides their first word; "" if there are no two labels."""
    split = [re.findall(r" ?(?:\([^)]*\)|\[[^\]]*\]|[^\s(\[])+| ?\([^)]*\)| ?\[[^\]]*\]", one) for one in {*labels}]
    shared = ""
    for words in zip(*(reversed(one[1:]) for one in split), strict=False) if len(split) > 1 else ():
        if len({*words}) > 1:
            break
        shared = words[0] + shared
    return shared


def shared_fields(labels: Iterable[str]) -> str:
    """The fields of tasks, `(length=2048)`, if all tasks have the same; else ""."""
    found = {label.partition("(")[1] + label.partition("(")[2] for label in labels}
    return found.pop() if len(found) == 1 else ""


class Sheet:
    """Panels of `width` by `height` inches, including labels, in at most `columns` columns."""

    def __init__(
        self, panels: int, columns: int, width: float, height: float, paper: Paper, least: float = LEAST
    ) -> None:
        self.paper, self.columns = paper, min(columns, panels)
        total = paper.width or max(self.columns * width, 4.4)
        if total < least:
            raise UsageError(f"--width {total:g} is too narrow for this figure, which needs {least:.1f} inches")
        if paper.width:
            self.columns = min(self.columns, int(total / least))
        rows = -(-panels // self.columns)
        self.panel_width = total / self.columns
        self.figure = Figure(figsize=(total, rows * height * min(1.0, max(self.panel_width / width, 0.7))))
        FigureCanvasAgg(self.figure)
        grid = self.figure.subplots(rows, self.columns, squeeze=False).flatten().tolist()
        for unused in grid[panels:]:
            unused.remove()
        self.axes: list[Axes] = grid[:panels]

    def is_left(self, index: int) -> bool:
        """Whether a panel is the first of its row."""
        return index % self.columns == 0

    def is_bottom(self, index: int) -> bool:
        """Whether a panel is the last of its column."""
        return index + self.columns >= len(self.axes)

    def set_title(self, axes: Axes, words: str) -> None:
        """Set the title of a panel, wrapped to its width."""
        axes.set_title(textwrap.fill(words, _letters(self.panel_width - 0.6, 1.0)), loc="left")

    def finish(self, title: str, notes: Sequence[str]) -> Figure:
        """Add title, legend and notes, increase the height of the figure for them, and return it."""
        notes = [*notes, *self.paper.notes]
        if not self.paper.caption:
            log.info("caption: %s. %s", title, " ".join(notes))
            title, notes = "", ()
        wide, high = self.figure.get_size_inches()
        text = "\n".join(textwrap.fill(note, _letters(wide - EDGE, 0.83), break_on_hyphens=False) for note in notes)
        head = textwrap.fill(title, _letters(wide - EDGE, 1.15))
        foot = self.figure.text(
            EDGE / wide, 0, text, size=0.83 * rcParams["font.size"], color=shown(FAINT), linespacing=1.35
        )
        key = self._legend(wide)
        above = 0.023 * rcParams["font.size"] * (head.count("\n") + 1) * bool(head) + EDGE
        foot_high, key_high = (0.0 if not x else _inches_high(x) + EDGE for x in (text and foot, key))
        total = above + high + key_high + foot_high
        self.figure.set_size_inches(wide, total)
        self.figure.text(EDGE / wide, 1 - EDGE / total, head, size=1.15 * rcParams["font.size"], va="top")
        foot.set_y(EDGE / total)
        if key is not None:
            key.set_bbox_to_anchor((0.5, (EDGE / 2 + foot_high) / total))
        panels = (0.0, (key_high + foot_high) / total, 1.0, high / total)
        self.figure.set_layout_engine("constrained", rect=panels, w_pad=0.08, h_pad=0.06)
        return self.figure

    def _legend(self, wide: float) -> Any:  # noqa: ANN401 - a matplotlib legend
        """A legend with the lines of all panels, renamed; None without lines."""
        found: dict[str, Any] = {}
        for axes in self.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                named = textwrap.fill(self.paper.name(label), max(24, _letters(wide - 1.2, 0.83)))
                found.setdefault(named, handle)
        if not found:
            return None
        each = 0.6 + 0.006 * rcParams["font.size"] * max(len(line) for name in found for line in name.split("\n"))
        most = max(1, min(len(found), int((wide - 2 * EDGE) / each)))
        columns = -(-len(found) // -(-len(found) // most))  # rows of equal length
        look: dict[str, Any] = {"loc": "lower center", "handlelength": 3, "borderaxespad": 0, "columnspacing": 1.6}
        return self.figure.legend(list(found.values()), list(found), ncols=columns, **look)


def _letters(inches: float, size: float) -> int:
    """The number of characters of a relative size that fit into a line."""
    return max(12, int(inches / (0.0078 * size * rcParams["font.size"])))


def _inches_high(words: Any) -> float:  # noqa: ANN401 - a text or a legend
    return float(words.get_window_extent().height) / float(words.get_figure(root=True).dpi)

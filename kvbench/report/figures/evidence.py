"""The figure of failures: right answers, and wrong ones whose evidence is held or evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures.panels import notes, panels_of, several_models
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import INK, PAPER, Look, shown
from kvbench.results.result import Result

_PARTS = (
    ("evidence_right", "right", "#0072B2"),
    ("evidence_missed", "wrong, a head holds all of the evidence", "#E69F00"),
    ("evidence_evicted", "wrong, no head holds all of it", "#C8C8C8"),
)
_NOTE = "Mark: share of the evidence held when the answer begins, mean over layers, KV heads and examples."


def failures(rows: Sequence[Result], _: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """One figure for each task and model with evidence: a bar for each policy and budget."""
    found = []
    panels = panels_of(row for row in rows if row.evidence_right is not None)
    several = several_models(panels)
    for panel in panels:
        order = sorted(panel.rows, key=lambda row: (not row.is_full, row.budget or 0, -(row.evidence_right or 0)))
        labels = [paper.name(row.line) + ("" if row.budget is None else f", {row.budget:g}") for row in order]
        wide = 0.065 * max(map(len, labels)) + 0.6  # of the labels
        sheet = Sheet(1, 1, 3.6 + wide, 0.21 * len(order) + 0.8, paper, 2.0 + wide)
        _bars(sheet.axes[0], order, labels)
        title = f"Right answers, and what became of the evidence of wrong ones: {panel.title(paper, several)}"
        found.append((f"evidence-{panel.task}-{panel.model}", sheet.finish(title, notes(order, _NOTE))))
    return [("evidence", found[0][1])] if len(found) == 1 else found


def _bars(axes: Axes, rows: Sequence[Result], labels: Sequence[str]) -> None:
    left = [0.0] * len(rows)
    for name, label, colour in _PARTS:
        wide = [getattr(row, name) for row in rows]
        if any(wide):  # the legend has only what is drawn
            axes.barh(range(len(rows)), wide, left=left, color=colour, label=label, height=0.75)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    kept = [row.kept_evidence or 0.0 for row in rows]
    style: dict[str, Any] = {
        "color": shown(INK),
        "marker": "D",
        "markersize": 4,
        "markerfacecolor": shown(PAPER),
        "linestyle": "none",
    }
    # a container, as the bars are: the legend has them in the order in which they are drawn
    axes.errorbar(kept, range(len(rows)), label="share of the evidence held", clip_on=False, zorder=3, **style)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the examples")
    axes.grid(visible=False, axis="y")

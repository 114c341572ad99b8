"""Figures of the divergence from the full cache: against the budget, against bytes, and by position in the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report.figures import score
from kvbench.report.figures.panels import notes, panels_of, several_models
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import Look, by_factors
from kvbench.results.divergence import by_position
from kvbench.results.result import Result


def against_budget(rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """KL against the budget, both on logarithmic axes."""
    return score.against_budget(rows, looks, paper, "KL")


def against_bytes(rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """KL against the bytes held, both on logarithmic axes."""
    return score.against_bytes(rows, looks, paper, "KL")


def against_position(rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """KL by position in the answer: one figure for each budget, one panel for each task and model.

    Points are means over the tokens of a bin, which doubles in length, and over the examples that reach it.
    """
    known = [row for row in rows if row.measure == "KL" and row.kl and len(row.samples)]
    found = []
    for budget in dict.fromkeys(row.budget for row in known if row.budget is not None):
        some = [row for row in known if row.budget in (budget, None)]
        panels = panels_of(some)
        sheet = Sheet(len(panels), 3, *(score.ALONE if len(panels) == 1 else score.AMONG), paper)
        for index, (panel, axes) in enumerate(zip(panels, sheet.axes, strict=True)):
            _panel(axes, panel.rows, looks)
            sheet.set_title(axes, panel.title(paper, several_models(panels)))
            if sheet.is_bottom(index):
                axes.set_xlabel("token of the answer")
            if sheet.is_left(index):
                axes.set_ylabel(score.LABELS["KL"])
        title = f"Divergence from full by position, budget {budget:g}"
        found.append(
            (f"kl-position-{budget:g}", sheet.finish(title, notes(some, "Positions in bins of doubling length.")))
        )
    return found


def _panel(axes: Axes, rows: Sequence[Result], looks: Mapping[str, Look]) -> None:
    curves = {row.line: [(at, kl) for at, kl, _ in by_position(row.samples) if kl > 0] for row in rows}
    for line, curve in curves.items():
        if curve:
            axes.plot(*zip(*curve, strict=True), label=line, **looks[line].plot)
    points = [point for curve in curves.values() for point in curve]
    for which, values in zip("xy", zip(*points, strict=True), strict=False):
        by_factors(axes, (min(values), max(values)), which, whole=which == "x")

"""Figure of the tokens that each layer holds at the end of an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kvbench.report.figures.panels import notes, panels_of
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import Look, by_layer
from kvbench.results.result import Result
from kvbench.results.sample import Sample


def held(samples: Sequence[Sample]) -> list[float] | None:
    """Tokens per KV head that each layer holds at the end, mean over its heads and the examples; None if unknown."""
    known = [sample.kept_tokens for sample in samples if sample.kept_tokens]
    if not known or len({len(layers) for layers in known}) > 1:
        return None
    per_layer = np.array([[sum(heads) / max(1, len(heads)) for heads in layers] for layers in known])
    return [float(value) for value in per_layer.mean(axis=0)]


def layer_budgets(
    cells: Sequence[Result], looks: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """One figure with one panel for each task, model and budget in which layers hold different numbers of tokens."""
    paper, panels = paper or Paper(), []
    for panel in panels_of(cell for cell in cells if cell.evicts and cell.budget is not None):
        for budget in sorted({cell.budget for cell in panel.cells if cell.budget is not None}):
            own = {cell: layers for cell in panel.cells if cell.budget == budget and (layers := held(cell.samples))}
            if any(max(layers) > 1.01 * min(layers) for layers in own.values()):
                panels.append((f"{panel.task}, {panel.model}, budget {budget:g}", own))
    if not panels:
        return []
    sheet = Sheet(len(panels), 2, *((6.0, 4.0) if len(panels) == 1 else (4.2, 3.0)), paper)
    for index, ((title, own), axes) in enumerate(zip(panels, sheet.axes, strict=True)):
        for cell, layers in own.items():
            axes.plot(layers, label=cell.line, **looks[cell.line].plot)
        by_layer(axes)
        axes.set_ylim(bottom=0)
        sheet.set_title(axes, title)
        if sheet.is_left(index):
            axes.set_ylabel("tokens held per KV head")
    shown = [cell for _, own in panels for cell in own]
    return [("layers", sheet.finish("Tokens held by each layer", notes(shown, "At the end of an example.")))]

"""Figure of the tokens that each layer holds at the end of an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kvbench.report.figures.panels import notes, panels_of
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import Look, by_layer
from kvbench.results.result import Result
from kvbench.results.samples import Sample


def held(samples: Sequence[Sample]) -> list[float]:
    """Tokens per KV head that each layer holds at the end, mean over its heads and the examples; [] if unknown."""
    known = [sample.kept_tokens for sample in samples if sample.kept_tokens]
    if not known or len({len(layers) for layers in known}) > 1:
        return []
    per_layer = [[sum(heads) / max(1, len(heads)) for heads in layers] for layers in known]
    return [float(value) for value in np.mean(per_layer, axis=0)]


def layer_budgets(rows: Sequence[Result], looks: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """One figure with one panel for each task, model and budget in which layers hold different numbers of tokens."""
    panels: dict[str, dict[Result, list[float]]] = {}
    for panel in panels_of(row for row in rows if row.evicts and row.budget is not None):
        for row in sorted(panel.rows, key=lambda row: row.budget or 0):
            if layers := held(row.samples):
                title = f"{paper.task(panel.task)}, {panel.model}, budget {row.budget:g}"
                panels.setdefault(title, {})[row] = layers
    unequal = {k: v for k, v in panels.items() if any(max(one) > 1.01 * min(one) for one in v.values())}
    if not unequal:
        return []
    sheet = Sheet(len(unequal), 2, *((6.0, 4.0) if len(unequal) == 1 else (4.2, 3.0)), paper)
    for index, ((title, own), axes) in enumerate(zip(unequal.items(), sheet.axes, strict=True)):
        equal: dict[tuple[float, ...], list[str]] = {}  # policies with the same layers are one line
        for row, layers in own.items():
            equal.setdefault(tuple(layers), []).append(row.line)
        for tokens, lines in equal.items():
            label = ", ".join(map(paper.name, lines)) if len(lines) > 1 else lines[0]
            axes.plot(tokens, label=label, **looks[lines[0]].plot)
        by_layer(axes)
        axes.set_ylim(bottom=0)
        sheet.set_title(axes, title)
        if sheet.is_left(index):
            axes.set_ylabel("tokens held per KV head")
    shown = [row for own in unequal.values() for row in own]
    return [("layers", sheet.finish("Tokens held by each layer", notes(shown, "At the end of an example.")))]

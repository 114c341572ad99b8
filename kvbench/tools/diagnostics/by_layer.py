"""Panels over the layers: a line for each policy, the mean over prompts."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.figures.style import by_layer, legend_below, looks_of


def draw_by_layer(
    table: pd.DataFrame, figure: Figure, columns: Mapping[str, str], label: str, *, log: bool = False
) -> None:
    """A panel for each of these columns, under its title. log: one axis by factors; else each begins at 0."""
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    panels = figure.subplots(1, len(columns), sharey=log)
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for policy, rows in table.groupby("policy", sort=False):
            mean = rows.groupby("layer")[column].mean()
            axes.plot(mean.index, mean.to_numpy(), label=str(policy), **looks[str(policy)].plot)
        axes.set(title=title, **({"yscale": "log"} if log else {"ylim": (0, 1.05 * axes.dataLim.ymax)}))
        by_layer(axes)
    panels[0].set_ylabel(label)
    legend_below(figure, panels[0])

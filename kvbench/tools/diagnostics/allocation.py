"""Layer budgets: how many tokens each layer really holds (set CAKE and D2O beside uniform and pyramid)."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.figures.places import Spot, dodges, shifted
from kvbench.report.figures.style import by_layer, legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe

TITLE = "tokens per KV head held by each layer at the end of the prompt"
WIDE, HIGH = 60.0, 250.0  # points: between two layers, and of the panel


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: tokens held at the end of the prompt, mean, least and most over the KV heads."""
    kept = probe.prefilled().kept_tokens()[:, 0]  # [L,H_kv]
    return [
        {"layer": index, "mean": float(heads.float().mean()), "least": int(heads.min()), "most": int(heads.max())}
        for index, heads in enumerate(kept)
    ]


def draw(table: pd.DataFrame, figure: Figure) -> None:
    axes = figure.subplots()
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    means = table.groupby(["policy", "layer"], sort=False)[["mean", "least", "most"]].mean()
    lines = {policy: means.loc[policy] for policy in looks}
    top = 1.05 * means["most"].max()
    spots = [[_spot(layer, share / top) for layer, share in line["mean"].items()] for line in lines.values()]
    for (policy, line), move in zip(lines.items(), dodges(spots), strict=True):  # equal shares are usual
        aside, look = shifted(axes, move), looks[policy]
        axes.plot(line.index, line["mean"], label=policy, transform=aside, **look.plot)
        axes.fill_between(line.index, line["least"], line["most"], alpha=0.15, color=look.colour, linewidth=0)
    axes.set(ylabel="tokens per KV head (band: least to most)", ylim=(0, top))
    by_layer(axes)
    legend_below(figure, axes)


def _spot(layer: Any, share: float) -> Spot:  # noqa: ANN401 - a number of pandas' index
    """About where a point is drawn: only whether points touch is asked of it."""
    up = share * HIGH
    return Spot(float(layer) * WIDE, up, up, up)

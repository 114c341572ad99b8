"""Layer budgets: how many tokens each layer really holds (set CAKE and D2O beside uniform and pyramid)."""

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.figures.places import APART, Move, shifted
from kvbench.report.figures.style import by_layer, legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe

TITLE = "tokens per KV head held by each layer at the end of the prompt"


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
    for place, (policy, rows) in enumerate(table.groupby("policy", sort=False)):
        aside = shifted(axes, Move(APART * (place - (len(looks) - 1) / 2)))  # equal shares are usual
        layers, look = rows.groupby("layer")[["mean", "least", "most"]].mean(), looks[str(policy)]
        axes.plot(layers.index, layers["mean"], label=str(policy), transform=aside, **look.plot)
        axes.fill_between(layers.index, layers["least"], layers["most"], alpha=0.15, color=look.colour, linewidth=0)
    axes.set(ylabel="tokens per KV head (band: least to most)", ylim=(0, None))
    by_layer(axes)
    legend_below(figure, axes)

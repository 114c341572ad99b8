"""Layer budgets: tokens that each layer holds (compare CAKE and D2O with uniform and pyramid)."""

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.figures.style import by_layer, legend_below, looks_of, side_by_side
from kvbench.tools.diagnostics.probe import Probe

TITLE = "tokens per KV head held by each layer at the end of the prompt"


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: tokens held at the end of the prompt, mean, least and most over the KV heads."""
    kept = [layer.kept_tokens()[0] for layer in probe.prefilled().attention_layers]  # [H_kv] each
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
    aside = side_by_side(len(lines))  # equal shares are usual
    for (policy, line), move in zip(lines.items(), aside, strict=True):
        look = looks[policy]
        axes.plot(line.index + move, line["mean"], label=policy, **look.plot)
        axes.fill_between(line.index, line["least"], line["most"], alpha=0.15, color=look.colour, linewidth=0)
    axes.set(ylabel="tokens per KV head (band: least to most)", ylim=(0, top))
    by_layer(axes)
    legend_below(figure, axes)

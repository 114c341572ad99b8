"""Layer budgets: how many tokens each layer really holds (set CAKE and D2O beside uniform and pyramid)."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.diagnostics.probe import Probe

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
    for policy, rows in table.groupby("policy", sort=False):
        by_layer = rows.groupby("layer")[["mean", "least", "most"]].mean()
        (line,) = axes.plot(by_layer.index, by_layer["mean"], marker="o", label=str(policy))
        axes.fill_between(by_layer.index, by_layer["least"], by_layer["most"], alpha=0.15, color=line.get_color())
    axes.set(xlabel="layer", ylabel="tokens per KV head (band: least to most)", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()

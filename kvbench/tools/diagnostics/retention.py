"""Retention map: how many heads of each layer keep each token of the prompt (K-VEC, figure 4)."""

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.figures.style import HEAT
from kvbench.tools.diagnostics.probe import Probe

TITLE = "KV heads that keep each token, by layer"


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer and prompt position: the number of KV heads that hold it at the end of the prompt."""
    rows: list[dict[str, object]] = []
    for index, layer in enumerate(probe.prefilled().attention_layers):
        positions = layer.positions.flatten()
        counts = positions[positions >= 0].bincount(minlength=probe.length).tolist()
        rows += [{"layer": index, "position": p, "heads": n} for p, n in enumerate(counts)]
    return rows


def draw(table: pd.DataFrame, figure: Figure) -> None:
    first = table[table["example"] == table["example"].min()]
    policies = list(dict.fromkeys(first["policy"]))
    all_axes = figure.subplots(len(policies), 1, sharex=True, squeeze=False)[:, 0]
    most = first["heads"].max()
    for axes, policy in zip(all_axes, policies, strict=True):
        heat = first[first["policy"] == policy].pivot(index="layer", columns="position", values="heads")
        image = axes.imshow(heat, aspect="auto", interpolation="nearest", vmin=0, vmax=most, cmap=HEAT)
        axes.grid(visible=False)
        axes.set(ylabel="layer", title=policy)
    all_axes[-1].set_xlabel("position in the prompt" if len(first) == len(table) else "position in the first prompt")
    bar = figure.colorbar(image, ax=list(all_axes), label="KV heads that keep it", ticks=range(int(most) + 1))
    bar.ax.grid(visible=False)

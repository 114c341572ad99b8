"""What allocators look at, by layer: dispersion and shift (CAKE, figure 3), column-sum variance (D2O, figure 4).

Measured on the full prompt, so the probe's own policy does not matter.
"""

from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvbench.cache.cache import KVCache
from kvbench.config.presets import make_policy
from kvbench.inference.prefill import prefill
from kvbench.report.figures.style import HUES, by_layer
from kvbench.tools.diagnostics.probe import Probe

TITLE = "attention of the full prompt, by layer"
SOURCES = {"cake": ("dispersion", "shift"), "d2o": ("column_sum_variance",)}
# The numbers themselves, not brought to 0..1 over the layers.
LITERAL: dict[str, dict[str, Any]] = {"d2o": {"norm": "raw"}}


@torch.inference_mode()
def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: CAKE's entropy (dispersion) and variance (shift), D2O's variance of attention column sums."""
    columns: dict[str, list[float]] = {}
    for slug, names in SOURCES.items():
        policy = make_policy(slug, 40, **LITERAL.get(slug, {}))
        cache = KVCache(probe.model.config, policy, prompt_length=probe.length)
        prefill(probe.model, probe.ids, None, cache)
        statistics = cache.group.budgets.statistics(0)
        for place, name in enumerate(names):
            columns[name] = [layer[place] for layer in statistics]
    return [
        {"layer": n, **{name: values[n] for name, values in columns.items()}}
        for n in range(len(cache.attention_layers))
    ]


def draw(table: pd.DataFrame, figure: Figure) -> None:
    names = [name for names in SOURCES.values() for name in names]
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        mean = table.groupby("layer")[name].mean()
        axes.plot(mean.index, mean.to_numpy(), color=HUES[0], marker="o")
        axes.set(title=name.replace("_", " "), ylim=(0, None))
        by_layer(axes)

"""Which tokens are worth keeping exact in a quantised layer: those of small keys (OTT, figure 1(c))."""

from dataclasses import replace
from typing import Literal, get_args

import pandas as pd
from matplotlib.figure import Figure

from kvbench.policies.policy import Policy
from kvbench.policies.stores.ott import Ott
from kvbench.report.figures.style import HUES, LINES, MARKERS, legend_below
from kvbench.tools.diagnostics.probe import Probe
from kvbench.tools.diagnostics.reconstruction import errors, keeps_all, record

TITLE = "attention-output error against the number of exact tokens"
Trace = Literal["smallest", "random", "largest"]
TRACES: tuple[Trace, ...] = get_args(Trace)
COUNTS = (0, 1, 2, 4, 8, 16, 32)


def check(policy: Policy, name: str) -> None:
    """ValueError for a policy without OTT's store, or one that evicts."""
    if not isinstance(policy.store, Ott):
        raise ValueError(f"policy={name} keeps no chosen tokens exact: use an ott policy, such as ott_g32_r0")
    keeps_all(policy, name)


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer, choice and number of tokens: errors with so many tokens of every KV head kept exact.

    They are chosen once from the whole prompt, by the size of their keys or at random; bits, group and residual are
    those of the probe's policy. ValueError if it is not OTT's.
    """
    check(probe.policy, probe.name)
    store = probe.policy.store
    assert isinstance(store, Ott), "checked"
    layers = record(probe)
    return [
        {"layer": layer.layer, "kept": trace, "tokens": count, **errors(layer, _keeping(store, trace, count))}
        for trace in TRACES
        for count in COUNTS
        for layer in layers
    ]


def _keeping(store: Ott, trace: Trace, count: int) -> Ott:
    """`count` tokens of all layers' KV heads, chosen once."""
    return replace(store, outliers=count, trace=trace, auxiliary=0, skip_layers=(), prefill_mode="joint")


def draw(table: pd.DataFrame, figure: Figure) -> None:
    policies = table.groupby("policy", sort=False)
    for axes, (policy, rows) in zip(figure.subplots(1, len(policies), squeeze=False)[0], policies, strict=True):
        for trace, hue, marker, line in zip(TRACES, HUES, MARKERS, LINES, strict=False):
            mean = rows[rows["kept"] == trace].groupby("tokens")["attention"].mean()
            label = trace if trace == "random" else f"{trace} keys"
            axes.plot(mean.index, mean.to_numpy(), color=hue, marker=marker, linestyle=line, label=label)
        axes.set(xlabel="exact tokens per KV head", title=str(policy))
    figure.axes[0].set_ylabel("L1 error / L1 norm, mean over layers")
    legend_below(figure, figure.axes[0])

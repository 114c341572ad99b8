"""Attention-output error against dense attention, per layer (CAOTE, figure 3).

Shapes: H_q query heads, M tokens of a call, D head dim.
"""

from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from kvbench.cache.cache import KVCache
from kvbench.cache.calls import Columns
from kvbench.cache.hook import LayerCall
from kvbench.config.presets import make_policy
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy, total_slots
from kvbench.report.figures.style import by_layer, legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe

TITLE = "normalised attention-output error, by layer"
KINDS = {"free": "free: two separate runs, drift included", "local": "local: the same hidden states"}


class _OutputRecorder(KVCache):
    """Records the attention output of every layer, [1,H_q,M,D] per call.

    shadow: a cache that gets the same queries, keys and values.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of a cache
        super().__init__(*args, **kwargs)
        self.outputs: list[list[Tensor]] = [[] for _ in self.attention_layers]
        self.shadow: KVCache | None = None

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        if self.shadow is not None:
            self.shadow.attend(call, module, queries, columns, params)
        out = super().attend(call, module, queries, columns, params)
        self.outputs[self._places[call.index]].append(out)
        return out


def _outputs(cache: _OutputRecorder) -> list[Tensor]:
    """[T + n, H_q * D] per attention layer, in float32."""
    return [torch.cat(calls, dim=2)[0].transpose(0, 1).flatten(1).float() for calls in cache.outputs]


def check(policy: Policy, name: str) -> None:
    """Raise ValueError for a policy with the output of dense attention."""
    if not policy.evicts and policy.pre_pass is None and policy.store.exact:
        raise ValueError(f"policy={name} keeps every token exactly, so its error is 0: choose another policy")


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: squared output errors over squared dense outputs, heads concatenated, before W_O.

    Over the prompt positions from the budget on and the decoded ones, all fed the dense model's greedy continuation.
    `free` compares two separate runs, drift of the hidden states included; `local` compares with dense attention over
    the same hidden states, which isolates the layer.
    """
    full = make_policy("full")
    dense, shadow, evicted = (probe.cache_of(_OutputRecorder, policy) for policy in (full, full, None))
    tokens = probe.follow(dense, None)
    evicted.shadow = shadow
    probe.follow(evicted, tokens)
    budget = total_slots(probe.policy, 1, probe.length)
    rows: list[dict[str, object]] = []
    for index, (free, local, got) in enumerate(zip(*map(_outputs, (dense, shadow, evicted)), strict=True)):
        pairs = {"free": free[budget:], "local": local[budget:]}
        errors = {k: float((v - got[budget:]).square().sum() / v.square().sum()) for k, v in pairs.items()}
        rows.append({"layer": index, **errors})
    return rows


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """One panel for each kind of error, with a line for each policy: the mean over prompts."""
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, (column, title) in zip(panels, KINDS.items(), strict=True):
        for policy, rows in table.groupby("policy", sort=False):
            mean = rows.groupby("layer")[column].mean()
            axes.plot(mean.index, mean.to_numpy(), label=str(policy), **looks[str(policy)].plot)
        axes.set(title=title, yscale="log")
        by_layer(axes)
    panels[0].set_ylabel("squared error / squared norm")
    legend_below(figure, panels[0])

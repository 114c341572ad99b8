"""Attention-output error against dense attention, per layer (CAOTE, figure 3).

Shapes: H_q query heads, M tokens of a call, D head dim.
"""

from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvbench.cache.kv_cache import KVCache
from kvbench.cache.layer import KVLayer
from kvbench.policies.observation import Arithmetic
from kvbench.policies.policy import Policy
from kvbench.report.figures.style import by_layer, legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe, full

TITLE = "normalised attention-output error, by layer"
KINDS = {"free": "free: two separate runs, drift included", "local": "local: the same hidden states"}


class _Recorder(KVLayer):
    """Keeps what its attention put out, [1,H_q,M,D] per call."""

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__(cache, index)
        self.outputs: list[Tensor] = []

    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        out = super().forward(queries, mask, how)
        self.outputs.append(out)
        return out


class _Shadowed(_Recorder):
    """Beside its own layer, a full layer that sees the same queries, keys and values."""

    def __init__(self, cache: KVCache, index: int, shadow: KVCache) -> None:
        super().__init__(cache, index)
        self._shadow = shadow.layers[index]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[KVLayer, KVLayer]:
        self._shadow.update(key_states, value_states)
        return super().update(key_states, value_states)

    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        self._shadow.forward(queries, mask, how)
        return super().forward(queries, mask, how)


def _outputs(cache: KVCache) -> list[Tensor]:
    """[T + n, H_q * D] per layer, in float32."""
    return [torch.cat(layer.outputs, dim=2)[0].transpose(0, 1).flatten(1).float() for layer in cache.layers]  # type: ignore[attr-defined]


def check(policy: Policy, name: str) -> None:
    """ValueError for a policy whose output is that of dense attention."""
    if not policy.evicts and policy.filter is None and policy.store.exact:
        raise ValueError(f"policy={name} keeps every token exactly, so it makes no error: choose one that does not")


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: squared output errors over squared dense outputs, heads concatenated, before W_O.

    Over the prompt positions from the budget on and the decoded ones, all fed the dense model's greedy continuation.
    `free` compares two separate runs, drift of the hidden states included; `local` compares with dense attention over
    the same hidden states, which isolates the layer.
    """
    dense = probe.cache_of(_Recorder, full())
    tokens = probe.follow(dense, None)
    shadow = probe.cache_of(_Recorder, full())
    evicted = probe.cache_of(_with(shadow))
    probe.follow(evicted, tokens)
    budget = probe.policy.total(1, probe.length)
    rows: list[dict[str, object]] = []
    for index, (free, local, got) in enumerate(zip(*map(_outputs, (dense, shadow, evicted)), strict=True)):
        errors = {
            name: _error(reference[budget:], got[budget:]) for name, reference in (("free", free), ("local", local))
        }
        rows.append({"layer": index, **errors})
    return rows


def _with(shadow: KVCache) -> Callable[[KVCache, int], KVLayer]:
    return lambda cache, index: _Shadowed(cache, index, shadow)


def _error(reference: Tensor, got: Tensor) -> float:
    return float((reference - got).square().sum() / reference.square().sum())


def draw(table: pd.DataFrame, figure: Figure) -> None:
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("free", "local"), strict=True):
        for policy, rows in table.groupby("policy", sort=False):
            mean = rows.groupby("layer")[kind].mean()
            axes.plot(mean.index, mean.to_numpy(), label=str(policy), **looks[str(policy)].plot)
        axes.set(title=KINDS[kind], yscale="log")
        by_layer(axes)
    figure.axes[0].set_ylabel("squared error / squared norm")
    legend_below(figure, figure.axes[0])

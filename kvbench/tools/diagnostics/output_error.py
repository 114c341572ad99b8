"""Attention-output error against dense attention, per layer (CAOTE, figure 3).

Shapes: H_q query heads, M tokens of a call, D head dim.
"""

from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvbench.cache.attention import QKV
from kvbench.cache.cache import KVCache
from kvbench.policies.layer_budgets import total_slots
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.tools.diagnostics.by_layer import draw_by_layer
from kvbench.tools.diagnostics.probe import Probe, full

TITLE = "normalised attention-output error, by layer"
KINDS = {"free": "free: two separate runs, drift included", "local": "local: the same hidden states"}


class _Recorder(KVCache):
    """Records the attention output of every layer, [1,H_q,M,D] per call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of a cache
        super().__init__(*args, **kwargs)
        self.outputs: list[list[Tensor]] = [[] for _ in self.attention_layers]

    def attend(self, index: int, new: QKV, mask: Tensor | None, how: AttentionParams) -> Tensor:
        out = super().attend(index, new, mask, how)
        self.outputs[index].append(out)
        return out


class _Shadowed(_Recorder):
    """Also passes the same queries, keys and values to a full cache."""

    shadow: _Recorder

    def attend(self, index: int, new: QKV, mask: Tensor | None, how: AttentionParams) -> Tensor:
        self.shadow.attend(index, new, mask, how)
        return super().attend(index, new, mask, how)


def _outputs(cache: _Recorder) -> list[Tensor]:
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
    dense = probe.cache_of(_Recorder, full())
    tokens = probe.follow(dense, None)
    shadow = probe.cache_of(_Recorder, full())
    evicted = probe.cache_of(_Shadowed)
    evicted.shadow = shadow
    probe.follow(evicted, tokens)
    budget = total_slots(probe.policy, 1, probe.length)
    rows: list[dict[str, object]] = []
    for index, (free, local, got) in enumerate(zip(*map(_outputs, (dense, shadow, evicted)), strict=True)):
        references = {"free": free, "local": local}
        errors = {name: _error(one[budget:], got[budget:]) for name, one in references.items()}
        rows.append({"layer": index, **errors})
    return rows


def _error(reference: Tensor, got: Tensor) -> float:
    return float((reference - got).square().sum() / reference.square().sum())


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_by_layer(table, figure, KINDS, "squared error / squared norm", log=True)

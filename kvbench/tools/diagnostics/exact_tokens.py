"""Error of a quantized layer by the choice of exact tokens: smallest, random or largest keys (OTT, figure 1(c)).

Shapes: H_kv KV heads, G query heads per KV head, C tokens, D head dim; one sequence.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvbench.kernels.references import attention_rows
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore, Store
from kvbench.report.figures.style import HUES, LINES, MARKERS, legend_below
from kvbench.tools.diagnostics.probe import Probe

TITLE = "attention-output error against the number of exact tokens"
Trace = Literal["smallest", "random", "largest"]
TRACES: tuple[Trace, ...] = get_args(Trace)
COUNTS = (0, 1, 2, 4, 8, 16, 32)
QUERIES = 64  # number of last queries of the prompt for which attention is compared


class _RecordingStore(SlotStore):
    """A dense layer that records its observations."""

    def __init__(self, keys: Tensor, values: Tensor, seen: list[Observation]) -> None:
        super().__init__(keys, values, (), 1)
        self._seen = seen

    @property
    def watching(self) -> bool:
        return True

    def observe(self, observation: Observation, prompt: int) -> None:
        self._seen.append(observation)


@dataclass(frozen=True)
class _Recording(Store):
    """Stores everything exactly, and records the observation of every layer."""

    seen: list[Observation]

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return _RecordingStore(keys, values, self.seen)


def check(policy: Policy, name: str) -> None:
    """Raise ValueError for a policy without OTT's store, or one that evicts."""
    if not isinstance(policy.store, Ott):
        raise ValueError(f"policy={name} has no exact tokens: use an ott policy, such as ott_g32_r0")
    if policy.evicts or policy.pre_pass is not None:
        why = "drops tokens, but exact_tokens compares stores with all tokens: use ott_g32_r0"
        raise ValueError(f"policy={name} {why}")


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer, choice and number of tokens: errors with this number of exact tokens per KV head.

    The tokens are selected once from the whole prompt, by the norm of their keys or at random. Bits, group and residual
    are fields of the probe's policy.
    """
    store = probe.policy.store
    assert isinstance(store, Ott), "see check"
    layers = record(probe)
    return [
        {"layer": layer.layer, "kept": trace, "tokens": count, **errors(layer, _keeping(store, trace, count))}
        for trace in TRACES
        for count in COUNTS
        for layer in layers
    ]


def record(probe: Probe) -> list[Observation]:
    """Exact queries, keys and values of every layer for the probe's prompt."""
    seen: list[Observation] = []
    Probe(probe.model, probe.ids, Policy(store=_Recording(seen)), probe.name).prefilled()
    return seen


@torch.inference_mode()
def errors(layer: Observation, store: Store) -> dict[str, float]:
    """Relative L1 errors of the keys, values and attention of a layer that `store` holds."""
    held = store.for_layer(layer.layer).open(layer.keys, layer.values, (), 1)
    held.append(layer.keys, layer.values, layer.query_positions)
    if held.watching:
        held.observe(layer, layer.keys.shape[2])
    held.settle()
    pairs = {
        "keys": (held.keys, layer.keys),
        "values": (held.values, layer.values),
        "attention": (_attention(layer, held.keys, held.values), _attention(layer, layer.keys, layer.values)),
    }
    return {name: float((x - y).abs().sum() / y.abs().sum()) for name, (x, y) in pairs.items()}


def _attention(layer: Observation, keys: Tensor, values: Tensor) -> Tensor:
    """Outputs of the layer's last queries over keys and values [1,H_kv,C,D]: [1,H_kv,G,QUERIES,D]."""
    queries, positions = layer.queries[:, :, -QUERIES:], layer.query_positions[:, -QUERIES:]
    how = layer.params
    params = how.scaling, how.softcap, how.sliding_window, how.sinks
    rows = attention_rows(queries, keys, positions, layer.positions, *params)
    return rows @ values[:, :, None].to(rows.dtype)


def _keeping(store: Ott, trace: Trace, count: int) -> Ott:
    """`count` tokens of all layers' KV heads, chosen once."""
    return replace(store, outliers=count, trace=trace, auxiliary=0, skip_layers=(), prefill_mode="joint")


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """One panel for each policy, with a line for each choice: the mean over layers and prompts."""
    policies = table.groupby("policy", sort=False)
    for axes, (policy, rows) in zip(figure.subplots(1, len(policies), squeeze=False)[0], policies, strict=True):
        for trace, hue, marker, line in zip(TRACES, HUES, MARKERS, LINES, strict=False):
            mean = rows[rows["kept"] == trace].groupby("tokens")["attention"].mean()
            label = trace if trace == "random" else f"{trace} keys"
            axes.plot(mean.index, mean.to_numpy(), color=hue, marker=marker, linestyle=line, label=label)
        axes.set(xlabel="exact tokens per KV head", title=str(policy))
    figure.axes[0].set_ylabel("L1 error / L1 norm, mean over layers")
    legend_below(figure, figure.axes[0])

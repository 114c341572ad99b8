"""What quantised stores lose of keys, values and attention, layer by layer.

Shapes: H_kv KV heads, G query heads per KV head, C tokens, D head dim; one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvbench.kernels.references import attention_rows
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.store import LayerStore, Store
from kvbench.tools.diagnostics.by_layer import draw_by_layer
from kvbench.tools.diagnostics.probe import Probe

TITLE = "what the store loses, by layer: L1 distance over the L1 norm of the exact tensor"
KINDS = {"keys": "keys", "values": "values", "attention": "attention output"}
QUERIES = 64  # the prompt's last ones, whose attention is compared


class _RecordingStore(DenseStore):
    """A dense layer that remembers what it was shown."""

    def __init__(self, keys: Tensor, values: Tensor, seen: list[Observation]) -> None:
        super().__init__(keys, values, (), 1)
        self._seen = seen

    @property
    def watching(self) -> bool:
        return True

    def observe(self, observation: Observation, prompts: Sequence[int | None]) -> None:
        self._seen.append(observation)


@dataclass(frozen=True)
class _Recording(Store):
    """Keeps everything exactly, and every layer's observation of the prompt."""

    seen: list[Observation]

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return _RecordingStore(keys, values, self.seen)


def check(policy: Policy, name: str) -> None:
    """ValueError for a policy that evicts, or whose store loses nothing."""
    keeps_all(policy, name)
    if policy.store.exact:
        raise ValueError(f"policy={name} stores every token exactly, so nothing is lost: use kivi, for example")


def keeps_all(policy: Policy, name: str) -> None:
    """ValueError for a policy that drops tokens."""
    if policy.evicts or policy.pre_pass is not None:
        raise ValueError(
            f"policy={name} drops tokens, and stores are compared on all of them: use a store alone, such as kivi, or "
            "the diagnostic output_error"
        )


def record(probe: Probe) -> list[Observation]:
    """Queries, keys and values of every layer for the probe's prompt, exactly. ValueError for a policy that evicts."""
    keeps_all(probe.policy, probe.name)
    seen: list[Observation] = []
    Probe(probe.model, probe.ids, Policy(store=_Recording(seen)), probe.name).prefilled()
    return seen


@torch.inference_mode()
def errors(layer: Observation, store: Store) -> dict[str, float]:
    """L1 errors, over L1 norms, of a layer's keys, values and attention after `store` has taken its prompt in."""
    held = store.for_layer(layer.layer).open(layer.keys, layer.values, (), 1)
    held.append(layer.keys, layer.values, layer.query_positions, absent=False)
    if held.watching:
        held.observe(layer, [layer.keys.shape[2]])
    held.settle()
    pairs = {
        "keys": (held.keys, layer.keys),
        "values": (held.values, layer.values),
        "attention": (_attention(layer, held.keys, held.values), _attention(layer, layer.keys, layer.values)),
    }
    return {name: float((x - y).abs().sum() / y.abs().sum()) for name, (x, y) in pairs.items()}


def _attention(layer: Observation, keys: Tensor, values: Tensor) -> Tensor:
    """Outputs of the layer's last queries over keys and values [1,H_kv,C,D]: [1,H_kv,G,QUERIES,D]."""
    rows = attention_rows(
        layer.queries[:, :, -QUERIES:],
        keys,
        layer.query_positions[:, -QUERIES:],
        layer.positions,
        layer.scaling,
        layer.softcap,
        layer.sliding_window,
        layer.sinks,
    )
    return rows @ values[:, :, None].to(rows.dtype)


def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer: errors of keys, values and the attention output of the prompt's last queries."""
    return [{"layer": layer.layer, **errors(layer, probe.policy.store)} for layer in record(probe)]


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_by_layer(table, figure, KINDS, "L1 error / L1 norm")

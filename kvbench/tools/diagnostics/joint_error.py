"""What treating evictions one by one costs: the error of evicting a set together, beside the sum of its CAOTE scores.

Shapes: H_kv KV heads, T slots, D head dim.
"""

from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.cache.state import LayerState
from kvbench.kernels.references import widen
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.values.caote import Caote, normalise
from kvbench.report.figures.style import legend_below, looks_of
from kvbench.tools.diagnostics.probe import Probe

TITLE = "joint eviction error beside the sum of single errors"


def joint_error(alpha: Tensor, values: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """Norm of X - X'_S for the evicted set S, and the sum of its single errors: [H] each.

    alpha [H,T] sums to 1, values [H,T,D], evicted [H,T] bool.
    X - X'_S = sum_S alpha_j (v_j - X) / (1 - sum_S alpha_j); for one token that is CAOTE's score (its eq. 8).
    """
    centre = (alpha[..., None] * values).sum(1, keepdim=True)
    away = values - centre
    gone = alpha * evicted
    left = (1 - gone.sum(-1)).clamp(min=1e-6)
    joint = (gone[..., None] * away).sum(1).norm(dim=-1) / left
    single = gone / (1 - alpha).clamp(min=1e-6) * away.norm(dim=-1)
    return joint, single.sum(-1)


def _noting(rows: list[dict[str, object]]) -> Callable[[LayerState, Ranking, Tensor], None]:
    """Notes both errors at every eviction of several tokens."""

    def note(layer: LayerState, ranking: Ranking, kept: Tensor) -> None:
        values, positions = widen(layer.store.values[0]), ranking.positions[0]
        base = ranking.scores if ranking.tie_break is None else ranking.tie_break
        evicted = (positions >= 0) & ~kept[0]
        joint, single = joint_error(normalise(base[0], positions >= 0), values, evicted)
        for head, (together, apart) in enumerate(zip(joint.tolist(), single.tolist(), strict=True)):
            count = int(evicted[head].sum())
            rows.append({"layer": layer.index, "head": head, "evicted": count, "joint": together, "sum": apart})

    return note


def check(policy: Policy, name: str) -> None:
    """ValueError for a policy without value-aware scores."""
    if not isinstance(policy.value, Caote):
        raise ValueError(f"joint_error compares CAOTE's scores: policy={name} has none, use a caote_ policy")


@torch.inference_mode()
def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per eviction of the prompt, layer and KV head; ValueError for a policy without value-aware scores."""
    check(probe.policy, probe.name)
    cache, rows = probe.cache_of(KVCache), list[dict[str, object]]()
    cache.group.on_evict = _noting(rows)
    probe.follow(cache, None)
    return rows


def draw(table: pd.DataFrame, figure: Figure) -> None:
    axes = figure.subplots()
    looks = looks_of([str(policy) for policy in table["policy"].unique()])
    for policy, rows in table.groupby("policy", sort=False):
        points = {**looks[str(policy)].points, "markersize": 4, "alpha": 0.6, "linestyle": "none"}
        axes.plot(rows["sum"], rows["joint"], label=str(policy), **points)
    top = float(table[["sum", "joint"]].to_numpy().max())
    axes.plot([0, top], [0, top], color="grey", linewidth=1, label="equal")
    axes.set(xlabel="sum of single errors of the evicted", ylabel="error of evicting them together")
    legend_below(figure, axes)

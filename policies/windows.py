"""Moments over an observation window: how much attention each key drew from its queries, and how unsteadily.

Shapes: B batch, H_kv KV heads, G query heads per KV head, W queries of the window, T slots.
"""

from typing import Literal

from torch import Tensor

from kvbench.policies.observation import Observation

StatsDtype = Literal["float32", "model"]


def check_stats_dtype(stats_dtype: str) -> None:
    """ValueError unless it names a precision."""
    if stats_dtype not in ("float32", "model"):
        raise ValueError(f"stats_dtype must be float32 or model, got {stats_dtype!r}")


def window_rows(observation: Observation, window: int, stats_dtype: StatsDtype) -> Tensor:
    """Attention of the newest `window` queries, [B,H_kv,G,W,T]; `model` rounds it to the dtype of the keys."""
    rows = observation.window_attention(window)
    return rows.to(observation.keys.dtype) if stats_dtype == "model" else rows


def variance(rows: Tensor) -> Tensor:
    """Unbiased variance of each column over the window: [...,W,T] -> [...,T]."""
    if rows.element_size() < 4:
        return rows.var(-2)  # one rounding at the end
    # Two passes: on a CPU a tenth of the time of `var`, which walks this dimension token by token.
    spread = rows - rows.mean(-2, keepdim=True)
    return spread.square_().sum(-2) / max(1, rows.shape[-2] - 1)

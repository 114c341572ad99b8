"""Attention over dequantised keys and values.

Shapes: B batch, H_q query heads, H KV heads, r query rows per KV head, M queries, C tokens, D head dim.
"""

from torch import Tensor

from kvbench.kernels.references import attention_rows, widen
from kvbench.policies.observation import AttentionParams


def attend_in_float32(
    queries: Tensor, positions: Tensor, how: AttentionParams, keys: Tensor, values: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention [B,H_q,M,D] of queries at positions [B,M], and its weights [B,H,r,C], in float32 (or float64).

    keys, values [B,H,C,D] and their positions `places` [B,H,C].
    """
    queries = widen(queries)
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    params = how.scaling, how.softcap, how.sliding_window, how.sinks
    rows = attention_rows(queries, keys, positions, places, *params).flatten(2, 3)
    return (rows @ values).view(*queries.shape[:3], -1), rows

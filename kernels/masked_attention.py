"""Attention under a mask, some queries at a time: no mask of all queries by all slots ever exists.

Sliding windows, padding, soft caps, sinks, slots in any order; in PyTorch, so that it has a gradient. GPUs have a
kernel for the same (`prompt_attention`).
Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, m of a block, T slots, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.attention_rows import attention_logits, beside_sinks, visible

PAIRS_AT_ONCE = 2**22  # of query and slot, over all query heads: 16 MiB of float32 logits, 4 MiB of mask
ROWS_OF_A_WINDOW = 256  # queries of a block that looks through a sliding window: it reads window + 256 slots


def masked_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    columns: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention output [B,H_q,M,D']; a query that sees nothing gives 0. Memory: linear in M and in T.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], values [B,H_kv,T,D'], query_positions [B,M], key_positions [B,H_kv or 1,T];
    -1 = padding, empty slot. sinks [1,H_q]: see `beside_sinks`. columns: slot i holds the token of query i, in every
    head, so that a sliding window leaves most slots out of reach. bias [B,H_kv,T]: see `attention_logits`.
    """
    batch, query_heads, new, _ = queries.shape
    slots = keys.shape[2]
    window = sliding_window if columns else None
    width = slots if window is None else min(slots, window + ROWS_OF_A_WINDOW)
    at_once = max(1, PAIRS_AT_ONCE // (batch * query_heads * width))
    if window is not None:
        at_once = min(at_once, ROWS_OF_A_WINDOW)
    outs = []
    for first in range(0, new, at_once):
        end = min(first + at_once, new)
        reach = slice(0 if window is None else max(0, first + 1 - window), end if columns else slots)
        here = queries[:, :, first:end], keys[:, :, reach], values[:, :, reach]
        seen = visible(query_positions[:, first:end], key_positions[..., reach], sliding_window)
        added = None if bias is None else bias[..., reach]
        outs.append(_block(*here, seen, scaling, softcap, sinks, added))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def attention_behind(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The same where the last M of T slots are the queries' own tokens, in order, and the others are all older.

    No position is looked at, and one small mask serves all heads: [B,H_q,M,D] -> [B,H_q,M,D'].
    """
    batch, query_heads, new, _ = queries.shape
    older = keys.shape[2] - new
    at_once = max(1, PAIRS_AT_ONCE // (batch * query_heads * keys.shape[2]))
    outs = []
    for first in range(0, new, at_once):
        end = min(first + at_once, new)
        reach = slice(0, older + end)
        seen = torch.ones(1, 1, end - first, older + end, dtype=torch.bool, device=keys.device).tril(older + first)
        outs.append(grouped_attention(queries[:, :, first:end], keys[:, :, reach], values[:, :, reach], seen, scaling))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention under the mask seen [B,H_kv or 1,m,S]."""
    nothing = ~seen.any(-1)  # [B,H_kv or 1,m]
    readable = seen | nothing[..., None]  # a softmax over nothing is no number: such rows are computed and emptied
    if softcap is None and sinks is None and bias is None:
        out = grouped_attention(queries, keys, values, readable, scaling)
    else:
        logits = attention_logits(queries, keys, scaling, softcap, bias)
        logits = logits.masked_fill(~readable[:, :, None], -torch.inf)
        rows = logits.softmax(-1)
        if sinks is not None:
            rows = rows * beside_sinks(logits.logsumexp(-1), sinks.view(1, *logits.shape[1:3], 1))[..., None]
        out = (rows.to(values.dtype) @ values[:, :, None]).flatten(1, 2)
    groups = queries.shape[1] // nothing.shape[1]
    return out.masked_fill(nothing.repeat_interleave(groups, dim=1)[..., None], 0.0)


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """SDPA with a group's query heads as rows of their KV head, so that keys and values are never repeated.

    seen [B,H_kv or 1,M,T]: None, where every query sees every slot.
    """
    batch, query_heads, new, dim = queries.shape
    heads = keys.shape[1]
    rows = queries.reshape(batch, heads, query_heads // heads * new, dim)
    mask = None if seen is None else seen.repeat(1, 1, query_heads // heads, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.view(batch, query_heads, new, values.shape[-1])

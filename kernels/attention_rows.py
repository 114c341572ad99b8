"""Attention rows of a few queries over the stored keys: what every observation window reads.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim.
"""

import torch
from torch import Tensor

FAR = 2.0**100  # so much below the others that its exponential is exactly 0, even one token away
NEVER = 2**24  # an empty slot's position: beyond all that float32 tells from their neighbours


def widen(x: Tensor) -> Tensor:
    """Statistics are kept in float32, or in float64 for a float64 model."""
    return x if x.dtype == torch.float64 else x.float()


def visible(query_positions: Tensor, key_positions: Tensor, sliding_window: int | None = None) -> Tensor:
    """Which slot each query may read: a stored token, not later than the query, inside the model's sliding window.

    query_positions [B,M] and key_positions [B,H,T] are original positions, -1 = padding or empty slot.
    Returns bool [B,H,M,T]. Causality compares original positions, never slots.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, :, None, :]
    seen = (keys >= 0) & (keys <= queries)
    if sliding_window is not None:
        seen &= keys > queries - sliding_window
    return seen


def attention_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Scaled, soft-capped logits in float32, before any mask: [B,H_q,M,D] x [B,H_kv,T,D] -> [B,H_kv,G,M,T].

    bias [B,H_kv,T] is added to every query's logit of a slot, behind the soft cap.
    """
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    rows = widen(queries).reshape(batch * heads, query_heads // heads * new, dim)
    columns = widen(keys).reshape(batch * heads, slots, dim).transpose(1, 2)
    logits = torch.baddbmm(rows.new_empty(1), rows, columns, beta=0, alpha=scaling)  # one launch, the scaling included
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.view(batch, heads, query_heads // heads, new, -1)
    return logits if bias is None else logits + bias[:, :, None, None].to(logits.dtype)


def beside_sinks(log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """What an attention sink leaves of the probability of rows whose logits have this (natural) log-sum-exp.

    sinks: its logits, of a shape that broadcasts. With it a row's weights, and so its output, are the plain ones times
    exp(lse) / (exp(lse) + exp(sink)). Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3; learnt in gpt-oss.
    """
    return torch.sigmoid(log_sum_exp - sinks.to(log_sum_exp.dtype))


def rows_and_sight(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    packed: bool = False,
    sighted: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax rows [B,H_kv,G,M,T] float32, and 1 for every query that sees something, else 0: [B,H_kv,M].

    Arguments as in `attention_rows`; the row of a query that sees nothing is without meaning. packed: no slot is empty.
    sighted: every query is known to see something; None then stands for the ones. sinks [B or 1,H_q]: see
    `beside_sinks`; a sink has no slot. bias [B,H_kv,T]: see `attention_logits`.
    """
    logits = attention_logits(queries, keys, scaling, softcap, bias).detach()  # what decides who stays has no gradient
    stored = key_positions if packed else key_positions.masked_fill(key_positions < 0, NEVER)
    age = query_positions.to(logits.dtype)[:, None, :, None] - stored.to(logits.dtype)[:, :, None]  # [B,H_kv,M,T]
    # How far a slot is out of sight, 0 or less, and no mask: a fill under a mask costs more than the softmax (CPU).
    if sliding_window is None:
        hidden = age.clamp_(max=0.0)
    else:
        hidden = (sliding_window - 1 - age).clamp_(max=0.0) + age.clamp(max=0.0)
    logits.add_(hidden[:, :, None], alpha=FAR)
    left = None if sinks is None else beside_sinks(logits.logsumexp(-1), sinks.view(len(sinks), *logits.shape[1:3], 1))
    rows = torch.softmax(logits, -1, out=logits)  # in place: half the memory, which no longer fits the cache of a core
    if left is not None:
        rows.mul_(left[..., None])
    return rows, None if sighted else (hidden.amax(-1) == 0.0).to(logits.dtype)


def attention_rows(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax rows over the stored keys, [B,H_kv,G,M,T] float32; meant for small M, since it really builds them.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], positions as in `visible`. A query at position -1 (padding), or one that
    sees nothing, gives a row of zeros; empty slots get weight 0. sinks [B or 1,H_q]: rows then sum to less than 1.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    rows, sight = rows_and_sight(*call, sinks=sinks, bias=bias)
    assert sight is not None
    return rows.mul_(sight[:, :, None, :, None])

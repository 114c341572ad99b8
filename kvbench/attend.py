"""Attention of a step's queries over what a layer holds.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, C slots, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.attention_rows import attention_logits, visible
from kvbench.kernels.decode_attention import decode_attention, decodes
from kvbench.policies.observation import Arithmetic
from kvbench.policies.stores.store import Held


def attend(queries: Tensor, positions: Tensor, held: Held, how: Arithmetic, newest: int | None, fresh: bool) -> Tensor:
    """Attention output [B,H_q,M,D] of queries [B,H_q,M,D] at positions [B,M] over the held slots.

    newest: the highest position of the step where all sequences are aligned and nothing is padded, else None.
    fresh: the held slots are exactly this step's tokens, in order, for every head. Queries that see no slot
    (padding) give 0.
    """
    if not fresh:
        own = held.attend(queries, positions, how)
        if own is not None:
            return own
    keys, values = held.keys, held.values
    inside = how.sliding_window is None or (newest is not None and newest < how.sliding_window)
    if not fresh and decodes(queries):
        packed = newest is not None and inside and held.packed
        window = None if inside else how.sliding_window
        places = (None, None) if packed else (positions, held.positions)
        return decode_attention(queries, keys, values, *places, how.scaling, how.softcap, window, packed=packed).out
    plain = newest is not None and inside and how.softcap is None
    if plain and fresh:
        gqa = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=queries.shape[2] > 1, scale=how.scaling, enable_gqa=gqa
        )
    if plain and queries.shape[2] == 1 and held.packed:
        return _grouped(queries, keys, values, None, how.scaling)
    shared = fresh  # a fresh prompt lies at the same positions in every head: one mask serves them all
    seen = visible(positions, held.positions[:, :1] if shared else held.positions, how.sliding_window)
    return _masked(queries, keys, values, seen, how)


def weigh(rows: Tensor, values: Tensor) -> Tensor:
    """Attention output [B,H_q,M,D] of known weights [B,H_kv,G,M,C] float32 over values [B,H_kv,C,D]."""
    batch, heads, group, new, slots = rows.shape
    weights = rows.view(batch * heads, group * new, slots).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(batch, heads * group, new, -1)


def _grouped(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """SDPA with a group's query heads as rows of their KV head, so keys and values are never repeated."""
    batch, query_heads, new, dim = queries.shape
    heads = keys.shape[1]
    rows = queries.reshape(batch, heads, query_heads // heads * new, dim)
    mask = None if seen is None else seen.repeat(1, 1, query_heads // heads, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.view(batch, query_heads, new, values.shape[-1])


def _masked(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: Arithmetic) -> Tensor:
    """Attention under the mask seen [B,H_kv or 1,M,C]; a row that sees nothing gives 0."""
    nothing = ~seen.any(-1)  # [B,H_kv or 1,M]
    if how.softcap is None:
        out = _grouped(queries, keys, values, seen | nothing[..., None], how.scaling)
    else:
        logits = attention_logits(queries, keys, how.scaling, how.softcap)
        rows = logits.masked_fill_(~(seen | nothing[..., None])[:, :, None], -torch.inf).softmax(-1)
        out = (rows.to(values.dtype) @ values[:, :, None]).flatten(1, 2)
    groups = queries.shape[1] // nothing.shape[1]
    return out.masked_fill_(nothing.repeat_interleave(groups, dim=1)[..., None], 0.0)

"""Attention of a step's queries over what a layer holds: which way it is computed.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, C slots, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.steps import Slice
from kvbench.kernels.decode_attention import decode_attention, decodes
from kvbench.kernels.jit import use_triton
from kvbench.kernels.masked_attention import grouped_attention, masked_attention
from kvbench.kernels.prompt_attention import one_for_all, prompt_attention
from kvbench.policies.observation import Arithmetic
from kvbench.policies.stores.store import Held


def attend(queries: Tensor, now: Slice, held: Held, how: Arithmetic, fresh: bool) -> Tensor:
    """Attention output [B,H_q,M,D] of a step's queries [B,H_q,M,D] over the held slots.

    fresh: the held slots are exactly this step's tokens, in order, for every head. Queries that see no slot
    (padding) give 0.
    """
    if not fresh:
        own = held.attend(queries, now.positions, how)
        if own is not None:
            return own
    keys, values = held.keys, held.values
    inside = how.sliding_window is None or (now.newest is not None and now.newest < how.sliding_window)
    if not fresh and decodes(queries):
        return _decode(queries, now, held, how, inside)
    plain = now.aligned and inside and how.softcap is None and how.sinks is None
    if plain and fresh:
        gqa = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=queries.shape[2] > 1, scale=how.scaling, enable_gqa=gqa
        )
    if plain and queries.shape[2] == 1 and held.packed:
        return grouped_attention(queries, keys, values, None, how.scaling)
    call = queries, keys, values, now.positions, held.positions
    asked = how.scaling, how.softcap, how.sliding_window
    if use_triton(queries) and use_triton(values) and not _has_gradient(queries):
        return prompt_attention(*call, *asked, one_for_all(how.sinks), aligned=fresh and now.aligned).out
    return masked_attention(*call, *asked, how.sinks, columns=fresh)


def _decode(queries: Tensor, now: Slice, held: Held, how: Arithmetic, inside: bool) -> Tensor:
    """One query of every sequence, by the kernel; it need not look at positions where the query sees every slot."""
    packed = now.aligned and inside and held.packed
    places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (now.positions, held.positions)
    window = None if inside else how.sliding_window
    asked = (*places, how.scaling, how.softcap, window, one_for_all(how.sinks))
    return decode_attention(queries, held.keys, held.values, *asked, packed=packed).out


def _has_gradient(queries: Tensor) -> bool:
    return torch.is_grad_enabled() and queries.requires_grad


def weigh(rows: Tensor, values: Tensor) -> Tensor:
    """Attention output [B,H_q,M,D] of known weights [B,H_kv,G,M,C] float32 over values [B,H_kv,C,D]."""
    batch, heads, group, new, slots = rows.shape
    weights = rows.view(batch * heads, group * new, slots).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(batch, heads * group, new, -1)

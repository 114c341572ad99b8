"""Attention of the newest queries over flat storage, in which every KV head has a segment of its own length.

The kernels are those of `decode_attention`: programs share the tiles of all segments, of all sequences, in proportion
to their lengths. Starts and counts are read on the device and may change from step to step: a CUDA graph recorded for
so many sequences and a capacity `most` follows them.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, N flat slots of all segments, D head dim of
queries and keys, D_v of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.append import append_ref
from kvbench.kernels.decode_attention import Attention, NewTokens, decode_attention_ref, launch
from kvbench.kernels.jit import use_triton


def decode_attention_flat_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    most: int,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
    sums: Tensor | None = None,
    new_tokens: NewTokens | None = None,
) -> Attention:
    """The definition: segments padded to the longest. Arguments and result as in `decode_attention_flat`."""
    if new_tokens is not None:
        _append(keys, values, starts, new_tokens)
    steps = torch.arange(most, device=counts.device)
    there = steps < counts[..., None]  # [B,H_kv,T]
    slots = (starts[..., None] + steps).masked_fill(~there, 0)
    positions = key_positions[slots].masked_fill(~there, -1)
    found = decode_attention_ref(
        queries, keys[slots], values[slots], query_positions, positions, scaling, softcap, sliding_window, sinks,
        weights=weights or sums is not None,
    )  # fmt: skip
    if sums is not None and found.weights is not None:
        drawn = found.weights.sum(3).transpose(-1, -2)  # [B,H_kv,T,G], 0 beyond a segment's end
        drawn = drawn if sums.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)
        sums.index_put_((slots,), drawn, accumulate=True)
    return found if weights else found._replace(weights=None)


@torch.no_grad()
def decode_attention_flat_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    most: int,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
    sums: Tensor | None = None,
    programs: int | None = None,
    new_tokens: NewTokens | None = None,
) -> Attention:
    """`decode_attention_flat` on the same kernels; arguments beside its own as in `decode_attention_triton`."""
    segments, positions = (starts.contiguous(), counts.contiguous()), (query_positions, key_positions)
    how = scaling, softcap, sliding_window, sinks
    if new_tokens is not None and keys.dtype == torch.bfloat16 and not keys.is_cuda:  # interpreted, on copies of them
        _append(keys, values, starts, new_tokens)
        new_tokens = None
    return launch(
        queries, keys, values, positions, segments, starts.shape[1], most, how, weights, sums, programs, new_tokens
    )  # fmt: skip


def _append(keys: Tensor, values: Tensor, starts: Tensor, new: NewTokens) -> None:
    append_ref({"keys": keys, "values": values}, {"keys": new.keys, "values": new.values}, starts, new.slots)


def decode_attention_flat(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    starts: Tensor,
    counts: Tensor,
    most: int,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
    sums: Tensor | None = None,
    new_tokens: NewTokens | None = None,
) -> Attention:
    """`decode_attention` over segments of flat tensors, one per KV head of every sequence, each of its own length.

    keys [N,D], values [N,D_v] and key_positions [N]; segment (b, h) is slots starts[b,h] to starts[b,h] + counts[b,h].
    starts, counts [B,H_kv] stay on the device; most bounds every count. Weights are padded to [B,H_kv,G,M,most]; sums
    are flat, [N,G or 1]. new_tokens: keys and values that are written into their segments first.
    """
    attend = decode_attention_flat_triton if use_triton(queries) else decode_attention_flat_ref
    return attend(
        queries, keys, values, query_positions, key_positions, starts, counts, most, scaling, softcap,
        sliding_window, sinks, weights, sums, new_tokens=new_tokens,
    )  # fmt: skip

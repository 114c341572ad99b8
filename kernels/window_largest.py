# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""The largest KV head's attention from an observation window: how important K-VEC takes a token to be.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, W queries of the window, T slots, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows
from kvbench.kernels.jit import View, at_head, jit, tl, use_triton
from kvbench.kernels.prompt_tiles import Rule, Vectors, rule_of, slot_places, tile
from kvbench.kernels.window_statistics import Window, prepared, window_weights


def window_largest_ref(
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
    """The definition, from the rows. Arguments and result as in `window_largest`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks, bias)
    return rows.mean(2).amax(1).sum(-2)


@jit
def _largest(
    asked: Window,
    k: View,
    out_ptr: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    W: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One program: BLOCK_T slots of one sequence, the mean weights of its KV heads in turn and the largest so far."""
    batch = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    members = tl.arange(0, BLOCK_W)
    q_place = tl.load(asked.query_positions + batch * W + members, mask=members < W, other=-1).to(tl.int32)
    largest = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for head in range(H_kv):
        row = batch * H_kv + head
        k_place = slot_places(asked.key_positions + row * T, slots, T, False)
        own = Vectors(at_head(k, row, H_kv) + slots.to(tl.int64) * k.row, slots < T, k.dim)
        held = tile(own, 0, DIMS.D, DIMS.BLOCK)
        group = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        for g in range(G):
            first = (row * G + g) * W
            group += window_weights(asked, held, own, k_place, q_place, first, W, rule, DIMS, BLOCK_W)
        largest = tl.maximum(largest, group)
    tl.store(out_ptr + batch * T + slots, tl.sum(largest, 1) / G, mask=slots < T)


def narrowed(how: dict[str, Any]) -> dict[str, Any]:
    """The tiles of `window_statistics`, more warps for fewer slots: the largest head's weights are in registers too.

    No register spills for windows of up to 64 queries. Left alone, ptxas takes 128 registers of wide heads and spills.
    """
    slots, warps = (64, 4) if how["BLOCK_W"] <= 16 else (64, 8) if how["BLOCK_W"] <= 32 else (32, 8)
    registers = {"maxnreg": 255} if how["DIMS"].WHOLE > 128 else {}
    return {**how, "BLOCK_T": min(slots, how["BLOCK_T"]), "num_warps": warps, **registers}


def window_largest_triton(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`window_largest` in three launches, like `window_statistics_triton`."""
    (batch, query_heads, new, _), (heads, slots) = queries.shape, keys.shape[1:3]
    rule = rule_of(scaling, softcap, sliding_window)
    asked, k, how = prepared(queries, keys, query_positions, key_positions, sinks, rule)
    how = narrowed(how)
    out = torch.empty(batch, slots, dtype=torch.float32, device=keys.device)
    with torch.cuda.device_of(keys):
        _largest[-(-slots // how["BLOCK_T"]), batch](
            asked, k, out, heads, query_heads // heads, new, slots, rule, **how
        )
    return out


@torch.no_grad()
def window_largest(
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
    """The largest KV head's mean attention at each slot, summed over the queries: [B,T] float32.

    Arguments as in `window_statistics`; the heads hold the same tokens in the same slots. bias
    [B,H_kv,T]: see `attention_logits`. CUDA: Triton; CPU, and with a bias: the rows.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks
    if bias is None and use_triton(queries) and use_triton(keys):
        return window_largest_triton(*call)
    return window_largest_ref(*call, bias)

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""First and second moments of attention over a call's queries: what RoCo's mean and deviation are made of.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, R of them at once, T slots, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, widen
from kvbench.kernels.jit import at_head, jit, tl, use_triton, view
from kvbench.kernels.prompt_attention import one_for_all, prompt_attention_triton
from kvbench.kernels.prompt_tiles import (
    LITTLE,
    Rule,
    Vectors,
    hidden,
    logits_of,
    query_blocks,
    query_places,
    rule_of,
    same_dtype,
    shared_memory,
    slot_places,
    sum_tiles,
    tile,
)
from kvbench.kernels.softmax_blocks import FEW_QUERIES, Attended, softmax_blocks


class Moments(NamedTuple):
    """Per slot, [B,H_kv,T] float32 each: the sum over queries of the group's mean attention, and of its square."""

    sums: Tensor
    squares: Tensor


def attention_moments_ref(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Moments:
    """The definition: all rows at once. Arguments and result as in `attention_moments`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks, bias)
    mean = rows.mean(2)  # [B,H_kv,M,T]
    return Moments(mean.sum(-2), mean.square().sum(-2))


@jit
def _moments(
    q: tl.tensor,
    k: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One program: BLOCK_T slots of one KV head, the group's summed weights and their squares over all M queries.

    One loop goes over blocks of queries and, within each, over the heads of the group, so that loads run ahead of sums.
    """
    row = tl.program_id(0).to(tl.int64)  # of B * H_kv
    start = tl.program_id(1) * BLOCK_T
    q_ptr = at_head(q, row * G, H_kv * G)
    q_pos_ptr += row // H_kv * M
    k_pos_ptr += row * T
    lse_ptr += row * G * M
    slots = start + tl.arange(0, BLOCK_T)
    k_place = slot_places(k_pos_ptr, slots, T, ALIGNED)
    begin, blocks, masked = query_blocks(q_pos_ptr, k_place, start, M, T, rule.window, ALIGNED, BLOCK_M, BLOCK_T)
    own = Vectors(at_head(k, row, H_kv) + slots.to(tl.int64) * k.row, slots < T, k.dim)
    held = tile(own, 0, DIMS.D, DIMS.BLOCK)
    sums = tl.zeros([BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    group = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)  # weights of the heads so far
    for part in tl.static_range(2):  # the queries that see some of these slots, then those that see all of them
        first, steps = (0, masked) if part == 0 else (masked, blocks - masked)
        for step in range(steps * G):
            queries = begin + (first + step // G) * BLOCK_M + tl.arange(0, BLOCK_M)
            there, member = queries < M, (step % G).to(tl.int64)
            lse = tl.load(lse_ptr + member * M + queries, mask=there, other=float("inf")) * 1.4426950408889634
            asking = Vectors(q_ptr + member * q.head + queries.to(tl.int64) * q.row, there, q.dim)
            logits = logits_of(held, own, asking, rule, DIMS)
            if part == 0:
                q_place = query_places(q_pos_ptr, queries, M, T, ALIGNED)
                logits = hidden(logits, q_place[None, :], k_place[:, None], rule.window)
            group += tl.exp2(logits - lse[None, :])
            done = (member == G - 1).to(tl.float32)
            sums += tl.sum(group, 1) * done
            squares += tl.sum(group * group, 1) * done
            group *= 1.0 - done
    tl.store(sums_ptr + row * T + slots, sums / G, mask=slots < T)
    tl.store(squares_ptr + row * T + slots, squares / (G * G), mask=slots < T)


def tiles(dim: int, dtype: torch.dtype, shared: int = LITTLE) -> dict[str, Any]:
    """As `sum_tiles`, but half as many queries at a time: a group's weights are in registers besides.

    64 of them spill on Blackwell, 8 bytes a thread, and 64 where positions are read (Triton 3.9, up to D = 128).
    """
    how = sum_tiles(dim, dtype, shared)
    return how if dtype == torch.float32 or dim > 128 else {**how, "BLOCK_M": 32}


def attention_moments_triton(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    log_sum_exp: Tensor | None = None,
    aligned: bool = False,
    sinks: Tensor | None = None,
) -> Moments:
    """`attention_moments` in one launch, or two where the rows' log-sum-exp is not known. CUDA tensors, any strides.

    ValueError for float64 and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    queries, keys = same_dtype("attention_moments", queries, keys)
    positions = query_positions.contiguous(), key_positions.contiguous()
    if log_sum_exp is None:
        log_sum_exp = prompt_attention_triton(
            queries, keys, None, *positions, scaling, softcap, sliding_window, one_for_all(sinks), aligned
        ).log_sum_exp
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    sums, squares = (queries.new_empty(batch, heads, slots, dtype=torch.float32) for _ in range(2))
    how = tiles(dim, queries.dtype, shared_memory(queries.device))
    with torch.cuda.device_of(queries):
        _moments[batch * heads, -(-slots // how["BLOCK_T"])](
            view(queries), view(keys), *positions, log_sum_exp.contiguous(), sums, squares, heads,
            query_heads // heads, new, slots, rule_of(scaling, softcap, sliding_window), ALIGNED=aligned, **how,
        )  # fmt: skip
    return Moments(sums, squares)


@torch.no_grad()
def attention_moments(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    attended: Attended | None = None,
    log_sum_exp: Tensor | None = None,
    aligned: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Moments:
    """Moments of the attention each slot drew from the queries of a call, in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    attended: the attention output is computed from the same rows and written there (PyTorch).
    log_sum_exp [B,H_q,M] and aligned: as `prompt_attention` gives and takes them; only the kernel has a use for them.
    sinks [B or 1,H_q]: see `beside_sinks`. bias [B,H_kv,T]: see `attention_logits`.
    CUDA: Triton, ValueError without it. A few queries: their rows, on any device; with a bias in PyTorch everywhere.
    """
    call = (queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    if queries.shape[2] <= FEW_QUERIES and attended is None and log_sum_exp is None:
        return attention_moments_ref(*call, sinks, bias)
    if attended is None and bias is None and use_triton(queries) and use_triton(keys):
        return attention_moments_triton(*call, log_sum_exp, aligned, sinks)
    sums, squares = widen(keys.new_empty(0)).new_zeros(2, *key_positions.shape)
    for reached, weights, inverse in softmax_blocks(*call, attended, sinks, bias):
        share = inverse[..., None] / inverse.shape[2]
        mean = weights[:, :, 0].mul_(share[:, :, 0])  # [B,H_kv,R,S], in the block's own buffer
        for head in range(1, inverse.shape[2]):
            mean.addcmul_(weights[:, :, head], share[:, :, head])
        sums[..., reached] += mean.sum(-2)
        squares[..., reached] += mean.square_().sum(-2)
    return Moments(sums, squares)

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Column sums of attention: how much each slot was attended to by all queries of a call (H2O's statistic).

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim. Logits are in base 2,
softmax(x) = exp2((x - lse) log2(e)): GPUs have exp2 in hardware, and on CPUs it takes a third of the time of exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, widen
from kvbench.kernels.jit import at_head, jit, tl, use_triton, view
from kvbench.kernels.prompt_attention import one_for_all, prompt_attention_triton
from kvbench.kernels.prompt_tiles import (
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


def column_sums_ref(
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
    """The definition: all rows at once, then their sum. Arguments and result as in `column_sums`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, sinks, bias)
    return rows.sum(-2)


@jit
def _column_sums(
    q: tl.tensor,
    k: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H_q: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One program: BLOCK_T slots of one query head, exp2(logit - lse) summed over all M queries in fp32.

    Tiles are [slots, queries]: the keys, as the left factor, stay in shared memory for the whole loop, and the weights
    of a slot lie in few threads' registers.
    """
    blocks_of_slots = tl.cdiv(T, BLOCK_T)
    start = tl.program_id(0) % blocks_of_slots * BLOCK_T
    row = (tl.program_id(0) // blocks_of_slots).to(tl.int64)  # of B * H_q
    q_ptr = at_head(q, row, H_q)
    q_pos_ptr += row // H_q * M
    k_pos_ptr += row // G * T
    slots = start + tl.arange(0, BLOCK_T)
    k_place = slot_places(k_pos_ptr, slots, T, ALIGNED)
    begin, blocks, masked = query_blocks(q_pos_ptr, k_place, start, M, T, rule.window, ALIGNED, BLOCK_M, BLOCK_T)
    own = Vectors(at_head(k, row // G, H_q // G) + slots.to(tl.int64) * k.row, slots < T, k.dim)
    held = tile(own, 0, DIMS.D, DIMS.BLOCK)
    sums = tl.zeros([BLOCK_T], tl.float32)
    for part in tl.static_range(2):  # the queries that see some of these slots, then those that see all of them
        first, steps = (0, masked) if part == 0 else (masked, blocks - masked)
        for step in range(steps):  # Triton 3.9 overlaps loads with sums only in loops that start at 0
            queries = begin + (first + step) * BLOCK_M + tl.arange(0, BLOCK_M)
            lse = tl.load(lse_ptr + row * M + queries, mask=queries < M, other=float("inf")) * 1.4426950408889634
            asking = Vectors(q_ptr + queries.to(tl.int64) * q.row, queries < M, q.dim)
            logits = logits_of(held, own, asking, rule, DIMS)
            if part == 0:
                q_place = query_places(q_pos_ptr, queries, M, T, ALIGNED)
                logits = hidden(logits, q_place[None, :], k_place[:, None], rule.window)
            sums += tl.sum(tl.exp2(logits - lse[None, :]), 1)
    tl.store(out_ptr + row * T + slots, sums, mask=slots < T)


def column_sums_triton(
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
) -> Tensor:
    """`column_sums` in one launch, or two where the log-sum-exp of the rows is not known. CUDA tensors, any strides.

    ValueError for float64 and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    queries, keys = same_dtype("column_sums", queries, keys)
    positions = query_positions.contiguous(), key_positions.contiguous()
    if log_sum_exp is None:
        log_sum_exp = prompt_attention_triton(
            queries, keys, None, *positions, scaling, softcap, sliding_window, one_for_all(sinks), aligned
        ).log_sum_exp
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    sums = queries.new_empty(batch, heads, query_heads // heads, slots, dtype=torch.float32)
    tiles = sum_tiles(dim, queries.dtype, shared_memory(queries.device))
    with torch.cuda.device_of(queries):
        _column_sums[-(-slots // tiles["BLOCK_T"]) * batch * query_heads,](
            view(queries), view(keys), *positions, log_sum_exp.contiguous(), sums, query_heads, query_heads // heads,
            new, slots, rule_of(scaling, softcap, sliding_window), ALIGNED=aligned, **tiles,
        )  # fmt: skip
    return sums


@torch.no_grad()
def column_sums_blocked(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    attended: Attended | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`column_sums` in PyTorch: blocks of rows in one reused buffer of O(T). float64 where an input is float64.

    attended: the attention output is computed from the same rows and written there.
    """
    batch, heads, slots = key_positions.shape
    total = widen(keys.new_empty(0)).new_zeros(batch, heads, queries.shape[1] // heads, slots)
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    for reached, weights, inverse in softmax_blocks(*call, attended, sinks, bias):
        total[..., reached] += inverse[..., None, :].matmul(weights).squeeze(-2)
    return total


def column_sums(
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
    bias: Tensor | None = None,
) -> Tensor:
    """Attention each slot drew, summed over the queries: [B,H_kv,G,T] float32 (float64 for float64), in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    log_sum_exp [B,H_q,M] and aligned: as `prompt_attention` gives and takes them; they save the kernel a pass over the
    keys and the reading of positions. sinks [B or 1,H_q]: see `beside_sinks`. bias [B,H_kv,T]: see `attention_logits`.
    CUDA: Triton, ValueError without it. A few queries: their rows, on any device; with a bias in PyTorch everywhere.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    if log_sum_exp is None and queries.shape[2] <= FEW_QUERIES:
        return column_sums_ref(*call, sinks, bias)
    if bias is None and use_triton(queries) and use_triton(keys):
        return column_sums_triton(*call, log_sum_exp, aligned, sinks)
    return column_sums_blocked(*call, sinks=sinks, bias=bias)

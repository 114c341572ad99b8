# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Column sums of attention: how much each slot was attended to by all queries of a call (H2O's statistic).

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim. Logits are in base 2,
softmax(x) = exp2(x log2(e) - lse): GPUs have exp2 in hardware, and on CPUs it takes a third of the time of exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, widen
from kvbench.kernels.jit import jit, next_power_of_two, require_triton, tl
from kvbench.kernels.softmax_blocks import FEW_QUERIES, LOG2E, Attended, softmax_blocks


def column_sums_ref(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """The definition: all rows at once, then their sum. Arguments and result as in `column_sums`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    return rows.sum(-2)


@jit
def _span(
    positions_ptr: tl.tensor, length: tl.tensor, low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where the positions low..high lie, in any order: the first such entry, and how many blocks reach the last one."""
    first = tl.full([1024], 2**30, tl.int32)
    last = tl.zeros([1024], tl.int32)
    for start in range(0, length, 1024):
        entries = start + tl.arange(0, 1024)
        positions = tl.load(positions_ptr + entries, mask=entries < length, other=-1)
        inside = (positions >= 0) & (positions >= low) & (positions <= high)
        first = tl.minimum(first, tl.where(inside, entries, 2**30))
        last = tl.maximum(last, tl.where(inside, entries + 1, 0))
    begin = tl.min(first, 0)
    return begin, tl.cdiv(tl.max(last, 0) - begin, BLOCK)


@jit
def _slot_positions(ptr: tl.tensor, slots: tl.tensor, T: tl.tensor) -> tl.tensor:
    """Positions of slots; empty ones and those beyond T lie later than every query."""
    positions = tl.load(ptr + slots, mask=slots < T, other=-1)
    return tl.where(positions < 0, 2**30, positions)


@jit
def _logits(
    q_rows: tl.tensor,
    k_rows: tl.tensor,
    q_there: tl.tensor,
    k_there: tl.tensor,
    q_dim: tl.tensor,
    k_dim: tl.tensor,
    q_pos: tl.tensor,
    k_pos: tl.tensor,
    D: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Logits [BLOCK_M,BLOCK_T] in base 2, -inf where a query may not read a slot, from pointers to rows of q and k."""
    logits = 0.0
    for start in tl.static_range(0, WHOLE_D, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D).to(tl.int64)
        q = tl.load(q_rows[:, None] + dims[None, :] * q_dim, mask=q_there[:, None] & (dims < D)[None, :], other=0.0)
        k = tl.load(k_rows[None, :] + dims[:, None] * k_dim, mask=k_there[None, :] & (dims < D)[:, None], other=0.0)
        logits += tl.dot(q, k, input_precision="ieee")
    logits *= scale
    if CAPPED:
        logits = cap * (1 - 2 / (tl.exp2(logits) + 1))  # tanh(y) = 1 - 2 / (exp(2y) + 1); scale brings 2y to base 2
    seen = k_pos[None, :] <= q_pos[:, None]
    if WINDOWED:
        seen = seen & (k_pos[None, :] > q_pos[:, None] - window)
    return tl.where(seen, logits, float("-inf"))


@jit
def _log_sum_exp(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    q_dim: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    k_dim: tl.tensor,
    H_q: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: base-2 log-sum-exp of BLOCK_M queries of one query head; +inf for a query that sees nothing."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most: they start first
    row = tl.program_id(1).to(tl.int64)  # of B * H_q
    batch, head = row // H_q, row % H_q
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // G * k_head
    q_pos_ptr += batch * M
    k_pos_ptr += row // G * T
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_pos = tl.load(q_pos_ptr + queries, mask=queries < M, other=-1)
    q_rows = q_ptr + queries.to(tl.int64) * q_row
    low = 0
    if WINDOWED:
        low = tl.min(tl.where(q_pos < 0, 2**30, q_pos), 0) - window + 1
    begin, blocks = _span(k_pos_ptr, T, low, tl.max(q_pos, 0), BLOCK_T)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for step in range(blocks):  # Triton 3.9 overlaps loads with sums only in loops that start at 0
        slots = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)
        k_rows = k_ptr + slots.to(tl.int64) * k_row
        k_pos = _slot_positions(k_pos_ptr, slots, T)
        logits = _logits(
            q_rows, k_rows, queries < M, slots < T, q_dim, k_dim, q_pos, k_pos, D, scale, cap, window,
            CAPPED, WINDOWED, WHOLE_D, BLOCK_D,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
        top = new_top
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse_ptr + row * M + queries, lse, mask=queries < M)


@jit
def _column_sums(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    q_dim: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    k_dim: tl.tensor,
    H_q: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: BLOCK_T slots of one query head, exp2(logit - lse) summed over all M queries in fp32."""
    row = tl.program_id(1).to(tl.int64)  # of B * H_q
    batch, head = row // H_q, row % H_q
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // G * k_head
    q_pos_ptr += batch * M
    k_pos_ptr += row // G * T
    lse_ptr += row * M
    slots = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k_pos = _slot_positions(k_pos_ptr, slots, T)
    k_rows = k_ptr + slots.to(tl.int64) * k_row
    high = 2**30
    if WINDOWED:
        high = tl.max(tl.where(k_pos == 2**30, -1, k_pos), 0) + window - 1
    begin, blocks = _span(q_pos_ptr, M, tl.min(k_pos, 0), high, BLOCK_M)
    sums = tl.zeros([BLOCK_T], tl.float32)
    for step in range(blocks):
        queries = begin + step * BLOCK_M + tl.arange(0, BLOCK_M)
        q_pos = tl.load(q_pos_ptr + queries, mask=queries < M, other=-1)
        q_rows = q_ptr + queries.to(tl.int64) * q_row
        lse = tl.load(lse_ptr + queries, mask=queries < M, other=float("inf"))
        logits = _logits(
            q_rows, k_rows, queries < M, slots < T, q_dim, k_dim, q_pos, k_pos, D, scale, cap, window,
            CAPPED, WINDOWED, WHOLE_D, BLOCK_D,
        )  # fmt: skip
        sums += tl.sum(tl.exp2(logits - lse[:, None]), 0)
    tl.store(out_ptr + row * T + slots, sums, mask=slots < T)


def tiles(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and launch options for heads of `dim` numbers: no register spills, at most 99 KiB of shared memory.

    16-bit tiles go to the tensor cores whole. float32 in full precision is summed by ordinary cores, 32 dimensions at
    a time: whole heads would spill (seen: 8 KiB a thread at D = 256, sm_90).
    """
    whole = max(16, next_power_of_two(dim))
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_T": 32, "WHOLE_D": max(32, whole), "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_T": 64, "WHOLE_D": whole, "BLOCK_D": whole, "num_warps": 4, "num_stages": 2}


def column_sums_triton(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`column_sums` in two launches: the log-sum-exp of every row, then every slot's sum. CUDA tensors, any strides.

    ValueError for float64 and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    require_triton("column_sums", queries.device)
    dtype = torch.promote_types(queries.dtype, keys.dtype)
    if dtype == torch.float64:
        raise ValueError("column_sums_triton sums in float32 and takes no float64 tensors: use column_sums_blocked")
    if not queries.is_cuda and dtype == torch.bfloat16:
        dtype = (
            torch.float32
        )  # Triton's interpreter multiplies the bit patterns of bfloat16 (3.9); these are its values
    queries, keys = queries.to(dtype), keys.to(dtype)
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    log_sum_exp = queries.new_empty(batch, query_heads, new, dtype=torch.float32)
    sums = queries.new_empty(batch, heads, query_heads // heads, slots, dtype=torch.float32)
    positions = query_positions.to(torch.int32).contiguous(), key_positions.to(torch.int32).contiguous()
    sizes = query_heads, query_heads // heads, new, slots, dim
    scale, cap = LOG2E * scaling, 0.0
    if softcap is not None:
        scale, cap = 2 * scale / softcap, LOG2E * softcap
    rest = (*queries.stride(), *keys.stride(), *sizes, scale, cap, sliding_window or 0)
    how = {"CAPPED": softcap is not None, "WINDOWED": sliding_window is not None, **tiles(dim, dtype)}
    with torch.cuda.device_of(queries):
        rows = batch * query_heads
        _log_sum_exp[-(-new // how["BLOCK_M"]), rows](queries, keys, *positions, log_sum_exp, *rest, **how)
        _column_sums[-(-slots // how["BLOCK_T"]), rows](queries, keys, *positions, log_sum_exp, sums, *rest, **how)
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
) -> Tensor:
    """`column_sums` in PyTorch: blocks of rows in one reused buffer of O(T). float64 where an input is float64.

    attended: the attention output is computed from the same rows and written there.
    """
    batch, heads, slots = key_positions.shape
    total = widen(keys.new_empty(0)).new_zeros(batch, heads, queries.shape[1] // heads, slots)
    blocks = softmax_blocks(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window, attended)
    for reached, weights, inverse in blocks:
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
) -> Tensor:
    """Attention each slot drew, summed over the queries: [B,H_kv,G,T] float32 (float64 for float64), in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    CUDA: Triton, ValueError without it. A few queries: their rows, on any device.
    """
    double = torch.float64 in (queries.dtype, keys.dtype)
    if queries.shape[2] <= FEW_QUERIES:
        sums = column_sums_ref
    elif queries.is_cuda and not double:
        sums = column_sums_triton
    else:
        sums = column_sums_blocked
    return sums(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of a prompt that gives out its log-sum-exp as well: what every statistic over all queries starts from.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim, D' value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_logits, visible, widen
from kvbench.kernels.jit import jit, next_power_of_two, strides, tl, use_triton
from kvbench.kernels.prompt_tiles import (
    LITTLE,
    capped,
    hidden,
    products,
    query_places,
    same_dtype,
    scale_and_cap,
    shared_memory,
    slot_places,
    span,
    tile,
    whole_dim,
)

FLASH, CUDNN = 1, 3  # torch.nn.attention.SDPBackend: the two that give out their log-sum-exp and share grouped heads
LOGITS_AT_ONCE = 2**22  # of the PyTorch path


class Attention(NamedTuple):
    """Output [B,H_q,M,D'] in the dtype of the values, and natural log-sum-exp of its logits [B,H_q,M] float32.

    A query that sees nothing, not even a sink, has output 0 and log-sum-exp +inf, with which all its weights are 0.
    """

    out: Tensor
    log_sum_exp: Tensor


def one_for_all(sinks: Tensor | None) -> Tensor | None:
    """Sinks [1,H_q] as [H_q], which is how the kernel takes them: one layer, the same in every sequence."""
    if sinks is None:
        return None
    assert len(sinks) == 1, "the kernel attends one layer at a time"
    return sinks[0]


def prompt_attention_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Attention:
    """The definition: all logits at once. Arguments and result as in `prompt_attention`."""
    logits = attention_logits(queries, keys, scaling, softcap)  # [B,H_kv,G,M,T]
    seen = visible(query_positions, key_positions, sliding_window)[:, :, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        taken = widen(sinks).view(1, keys.shape[1], -1, 1, 1).expand(*logits.shape[:4], 1)
        taken = taken.masked_fill(query_positions[:, None, None, :, None] < 0, -torch.inf)
        logits = torch.cat([logits, taken], dim=-1)
    lse = torch.logsumexp(logits, -1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    rows = torch.exp(logits - lse[..., None])[..., : keys.shape[2]]
    out = rows @ widen(values)[:, :, None]
    return Attention(out.flatten(1, 2).to(values.dtype), lse.flatten(1, 2))


@jit
def _forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_strides: tl.tensor,
    k_strides: tl.tensor,
    v_strides: tl.tensor,
    o_strides: tl.tensor,
    H_q: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    D: tl.constexpr,
    D_v: tl.constexpr,
    VALUES: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_M queries of one query head over all they see; BLOCK_V numbers of their output."""
    blocks = tl.cdiv(M, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks  # late queries see most: they start first
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H_q
    batch, head = row // H_q, row % H_q
    q_ptr += batch * q_strides.batch + head * q_strides.head
    k_ptr += batch * k_strides.batch + head // G * k_strides.head
    v_start = tl.program_id(1) * BLOCK_V
    v_ptr += batch * v_strides.batch + head // G * v_strides.head
    q_pos_ptr += batch * M
    k_pos_ptr += row // G * T
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_place = query_places(q_pos_ptr, queries, M, T, ALIGNED)
    if ALIGNED:
        begin = 0
        if WINDOWED:
            begin = tl.maximum(0, block * BLOCK_M + T - M - window + 1)
        end = tl.minimum(T, block * BLOCK_M + BLOCK_M + T - M)
        blocks = tl.cdiv(end - begin, BLOCK_T)
        free = 0  # blocks that all queries see whole
        if not WINDOWED:
            free = (block * BLOCK_M + T - M + 1) // BLOCK_T
    else:
        low = 0
        if WINDOWED:
            low = tl.min(tl.where(q_place < 0, 2**30, q_place), 0) - window + 1
        begin, blocks = span(k_pos_ptr, T, low, tl.max(q_place, 0), BLOCK_T)
        free = 0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.where(q_place >= 0, sink, float("-inf"))
        total = tl.where(q_place >= 0, 1.0, 0.0)
    out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if WHOLE_D == BLOCK_D:
        q = tile(q_ptr, queries, M, q_strides.row, q_strides.dim, 0, D, BLOCK_D)
    v_dims = v_start + tl.arange(0, BLOCK_V)
    for part in tl.static_range(2):  # first the blocks without a mask, then the others
        first = 0
        steps = free
        if part == 1:
            first = free
            steps = blocks - free
        for step in range(steps):  # Triton 3.9 overlaps loads with sums only in loops that start at 0
            slots = begin + (first + step) * BLOCK_T + tl.arange(0, BLOCK_T)
            if WHOLE_D == BLOCK_D:
                k = tile(k_ptr, slots, T, k_strides.row, k_strides.dim, 0, D, BLOCK_D)
                logits = tl.dot(q, tl.trans(k), input_precision="ieee")
            else:
                logits = products(
                    q_ptr, queries, M, q_strides.row, q_strides.dim, k_ptr, slots, T, k_strides.row,
                    k_strides.dim, D, WHOLE_D, BLOCK_D,
                )  # fmt: skip
            logits = capped(logits, scale, cap, CAPPED)
            if part == 1:
                k_place = slot_places(k_pos_ptr, slots, T, ALIGNED)
                logits = hidden(logits, q_place[:, None], k_place[None, :], window, WINDOWED)
            new_top = tl.maximum(top, tl.max(logits, 1))
            shift = new_top
            if part == 1:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(logits - shift[:, None])
            fading = tl.exp2(top - shift)
            total = total * fading + tl.sum(weights, 1)
            top = new_top
            if VALUES:
                v_at = v_ptr + slots.to(tl.int64)[:, None] * v_strides.row
                v_at += v_dims.to(tl.int64)[None, :] * v_strides.dim
                v = tl.load(v_at, mask=(slots < T)[:, None] & (v_dims < D_v)[None, :], other=0.0)
                if part == 1 and not ALIGNED:  # an empty slot may hold anything, and 0 times NaN is not 0
                    v = tl.where((k_place < 2**30)[:, None], v, 0.0)
                out = out * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    some = total > 0
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("inf"))
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row * M + queries, lse, mask=queries < M)
    if VALUES:
        out = out / tl.where(some, total, 1.0)[:, None]
        o_at = out_ptr + batch * o_strides.batch + head * o_strides.head + v_dims[None, :]
        o_at += queries.to(tl.int64)[:, None] * o_strides.row
        tl.store(o_at, out.to(out_ptr.dtype.element_ty), mask=(queries < M)[:, None] & (v_dims < D_v)[None, :])


def tiles(dim: int, value_dim: int, dtype: torch.dtype, aligned: bool, shared: int = LITTLE) -> dict[str, int]:
    """Tile sizes and launch options: no register spills, no more shared memory than there is; stages as `sum_tiles`.

    Where positions are read, as many queries and slots at a time would spill on Ampere beyond 64 dimensions (72 bytes a
    thread, Triton 3.9).
    """
    whole, values = whole_dim(dim, dtype), max(16, next_power_of_two(value_dim))
    if dtype == torch.float32:
        return {**whole, "BLOCK_V": min(values, 64), "BLOCK_M": 32, "BLOCK_T": 32, "num_warps": 4, "num_stages": 2}
    stages = 3 if shared >= 136 * 1024 else 2
    if max(whole["WHOLE_D"], values) > 128:
        return {**whole, "BLOCK_V": values, "BLOCK_M": 64, "BLOCK_T": 32, "num_warps": 8, "num_stages": stages}
    many = aligned or max(whole["WHOLE_D"], values) <= 64
    block = {"BLOCK_M": 128, "BLOCK_T": 64, "num_warps": 8} if many else {"BLOCK_M": 64, "BLOCK_T": 32, "num_warps": 4}
    return {**whole, **block, "BLOCK_V": values, "num_stages": stages}


def prompt_attention_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    aligned: bool = False,
) -> Attention:
    """`prompt_attention` in one launch. CUDA tensors, any strides; without values the log-sum-exp alone (out is empty).

    ValueError for float64 and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    given = keys if values is None else values
    q, k, v = same_dtype("prompt_attention", queries, keys, given)
    batch, query_heads, new, dim = q.shape
    slots, value_dim = k.shape[2], v.shape[-1]
    out_dim = 0 if values is None else value_dim
    out = torch.empty(batch, new, query_heads, out_dim, dtype=given.dtype, device=q.device).transpose(1, 2)
    log_sum_exp = torch.empty(batch, query_heads, new, dtype=torch.float32, device=q.device)
    places = query_positions.contiguous(), key_positions.contiguous()
    sizes = query_heads, query_heads // k.shape[1], new, slots
    how = tiles(dim, value_dim, q.dtype, aligned, shared_memory(q.device))
    parts = 1 if values is None else -(-value_dim // how["BLOCK_V"])
    with torch.cuda.device_of(q):
        _forward[-(-new // how["BLOCK_M"]) * batch * query_heads, parts](
            q, k, v, *places, log_sum_exp if sinks is None else sinks, out, log_sum_exp,
            strides(q), strides(k), strides(v), strides(out), *sizes,
            *scale_and_cap(scaling, softcap), sliding_window or 0,
            D=dim, D_v=value_dim, VALUES=values is not None, SINKS=sinks is not None,
            CAPPED=softcap is not None, WINDOWED=sliding_window is not None, ALIGNED=aligned, **how,
        )  # fmt: skip
    return Attention(out, log_sum_exp)


def _library_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Attention | None:
    """Causal attention of a whole prompt by the kernel that PyTorch itself would choose, where it tells its sums.

    So that a policy that reads sums gives, bit for bit, the attention of one that reads none.
    """
    chosen = torch._fused_sdp_choice(
        queries, keys, values, None, 0.0, True, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    if chosen == FLASH and queries.shape[-1] % 8 == 0:
        out, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, True, False, scale=scaling
        )
    elif chosen == CUDNN:
        out, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, True, 0.0, True, False, scale=scaling
        )
    else:
        return None
    return Attention(out, log_sum_exp.reshape(queries.shape[:3]))


@torch.no_grad()
def prompt_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    aligned: bool = False,
) -> Attention:
    """Attention output and log-sum-exp of the queries of a call, without a gradient.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], values [B,H_kv,T,D'], query_positions [B,M], key_positions [B,H_kv,T]; -1 =
    padding, empty slot. sinks [H_q]: logits that take probability and give nothing. aligned: every slot is occupied, in
    order of position in every sequence, the queries are the tokens of the last M slots, and a sliding window counts
    slots; positions are then not read. CUDA: the kernel PyTorch's own attention would use for a plain prompt in half
    precision, else Triton (ValueError without it). CPU, float64: PyTorch, some queries at a time.
    """
    call = scaling, softcap, sliding_window, sinks
    if not use_triton(queries):
        at_once = max(1, LOGITS_AT_ONCE // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
        parts = zip(queries.split(at_once, 2), query_positions.split(at_once, 1), strict=True)
        some = [prompt_attention_ref(q, keys, values, at, key_positions, *call) for q, at in parts]
        return Attention(torch.cat([part.out for part in some], 2), torch.cat([part.log_sum_exp for part in some], 2))
    plain = aligned and softcap is None and sinks is None and queries.shape[2] == keys.shape[2]
    inside = sliding_window is None or sliding_window >= keys.shape[2]
    if queries.is_cuda and plain and inside and queries.element_size() == 2:
        out = _library_attention(queries, keys, values, scaling)
        if out is not None:
            return out
    return prompt_attention_triton(queries, keys, values, query_positions, key_positions, *call, aligned)

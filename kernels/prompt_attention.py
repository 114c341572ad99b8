# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of a prompt that gives out its log-sum-exp as well: what every statistic over all queries starts from.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim, D' value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_logits, visible, widen
from kvbench.kernels.jit import at_head, jit, next_power_of_two, tl, use_triton, view
from kvbench.kernels.prompt_tiles import (
    LITTLE,
    Rule,
    Vectors,
    dims_of,
    hidden,
    log_sum,
    logits_of,
    query_places,
    rule_of,
    same_dtype,
    shared_memory,
    slot_blocks,
    slot_places,
    tile,
    weighed,
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
def _sunk(
    sinks_ptr: tl.tensor, head: tl.tensor, q_place: tl.tensor, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Maximum and sum of the softmax of BLOCK_M queries before their first slot: that of their head's sink, if any."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.where(q_place >= 0, sink, float("-inf"))
        total = tl.where(q_place >= 0, 1.0, 0.0)
    return top, total


@jit
def _forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    H_q: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    rule: Rule,
    D_V: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_M queries of one query head over all they see; BLOCK_V numbers of their output, if any."""
    blocks = tl.cdiv(M, BLOCK_M)
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # late queries see most: they start first
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H_q
    q_pos_ptr += row // H_q * M
    k_pos_ptr += row // G * T
    queries = start + tl.arange(0, BLOCK_M)
    q_place = query_places(q_pos_ptr, queries, M, T, ALIGNED)
    begin, blocks, free = slot_blocks(k_pos_ptr, q_place, start, M, T, rule.window, ALIGNED, BLOCK_M, BLOCK_T)
    top, total = _sunk(sinks_ptr, row % H_q, q_place, BLOCK_M)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    asking = Vectors(at_head(q, row, H_q) + queries.to(tl.int64) * q.row, queries < M, q.dim)
    held = tile(asking, 0, DIMS.D, DIMS.BLOCK)
    k_ptr, v_ptr = at_head(k, row // G, H_q // G), at_head(v, row // G, H_q // G)
    v_dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    for part in tl.static_range(2):  # first the blocks without a mask, then the others
        first, steps = (0, free) if part == 0 else (free, blocks - free)
        for step in range(steps):  # Triton 3.9 overlaps loads with sums only in loops that start at 0
            slots = begin + (first + step) * BLOCK_T + tl.arange(0, BLOCK_T)
            own = Vectors(k_ptr + slots.to(tl.int64) * k.row, slots < T, k.dim)
            logits = logits_of(held, asking, own, rule, DIMS)
            if part == 1:
                k_place = slot_places(k_pos_ptr, slots, T, ALIGNED)
                logits = hidden(logits, q_place[:, None], k_place[None, :], rule.window)
            weights, top, total, fading = weighed(logits, top, total)
            if out is not None:
                v_at = v_ptr + slots.to(tl.int64)[:, None] * v.row + v_dims.to(tl.int64)[None, :] * v.dim
                values = tl.load(v_at, mask=(slots < T)[:, None] & (v_dims < D_V)[None, :], other=0.0)
                if part == 1 and not ALIGNED:  # an empty slot may hold anything, and 0 times NaN is not 0
                    values = tl.where((k_place < 2**30)[:, None], values, 0.0)
                sums = sums * fading[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    if tl.program_id(1) == 0:
        lse = log_sum(top, total, float("inf")) * 0.6931471805599453
        tl.store(lse_ptr + row * M + queries, lse, mask=queries < M)
    if out is not None:
        at = at_head(out, row, H_q) + queries.to(tl.int64)[:, None] * out.row + v_dims[None, :]
        sums /= tl.where(total > 0, total, 1.0)[:, None]
        tl.store(at, sums.to(out.ptr.dtype.element_ty), mask=(queries < M)[:, None] & (v_dims < D_V)[None, :])


def tiles(dim: int, value_dim: int, dtype: torch.dtype, aligned: bool, shared: int = LITTLE) -> dict[str, Any]:
    """Tile sizes and launch options: no register spills, no more shared memory than there is; stages as `sum_tiles`.

    Where positions are read, as many queries and slots at a time would spill on Ampere beyond 64 dimensions (72 bytes a
    thread, Triton 3.9).
    """
    dims, values = dims_of(dim, dtype), max(16, next_power_of_two(value_dim))
    if dtype == torch.float32:
        return {"DIMS": dims, "BLOCK_V": min(values, 64), "BLOCK_M": 32, "BLOCK_T": 32, "num_warps": 4, "num_stages": 2}
    stages = 3 if shared >= 136 * 1024 else 2
    if max(dims.WHOLE, values) > 128:
        return {"DIMS": dims, "BLOCK_V": values, "BLOCK_M": 64, "BLOCK_T": 32, "num_warps": 8, "num_stages": stages}
    many = aligned or max(dims.WHOLE, values) <= 64
    block = {"BLOCK_M": 128, "BLOCK_T": 64, "num_warps": 8} if many else {"BLOCK_M": 64, "BLOCK_T": 32, "num_warps": 4}
    return {"DIMS": dims, **block, "BLOCK_V": values, "num_stages": stages}


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
            view(q), view(k), view(v), None if values is None else view(out), log_sum_exp, *places, sinks, *sizes,
            rule_of(scaling, softcap, sliding_window), D_V=value_dim, ALIGNED=aligned, **how,
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

"""Attention of a prompt, with its log-sum-exp, from which statistics over all queries are computed, and any mask.

GPU: PyTorch's fused kernels for plain causal attention, of whole prompts, and in 16 bits of blocks after older tokens;
flex_attention in 16 bits for soft caps, sliding windows, padding and slots in any order. CPU, other calls in float32,
heads of fewer than 16 numbers, or with gradients: PyTorch, some queries at a time, so that no mask of all queries by
all slots is built.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, m of a block, T slots, D head dim, D' value
dim.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvbench.kernels.devices import numbers_at_once, on_gpu
from kvbench.kernels.references import (
    LOGITS_AT_ONCE,
    NOWHERE,
    Attention,
    attention_logits,
    decode_attention_ref,
    grouped_attention,
    sink_factor,
    visible,
)

PAIRS_AT_ONCE = 2**22  # of query and slot, over all query heads: 16 MiB of float32 logits, 4 MiB of mask
ROWS_OF_A_WINDOW = 256  # queries of a block with a sliding window: it reads window + 256 slots
FLASH, CUDNN = 1, 3  # torch.nn.attention.SDPBackend: the two that return their log-sum-exp and support grouped heads
SMALLEST_FLEX_HEAD = 16  # flex_attention refuses smaller heads, and finds no kernel for large ones in float32
CONSTANTS = {"specialize_float": True, "recompile_limit": 64}
"""Settings of torch.compile. A soft cap is a constant of its kernel, because Inductor cannot compile a variable one.
Every combination of heads, cap and window has its own kernel; by default only the first 8 are compiled."""
BLOCK = 128  # queries and slots of a block that flex_attention computes or skips


def masked_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    columns: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention output [B,H_q,M,D'], 0 for a query that sees nothing. Memory is linear in M and in T.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], values [B,H_kv,T,D'], query_positions [B,M], key_positions [B,H_kv or 1,T];
    -1 = padding, empty slot. sinks [1,H_q]: see `sink_factor`. columns: the last M slots have the tokens of the
    queries, after all older ones, in every head, so that a sliding window excludes most slots. bias [B,H_kv,T]: see
    `attention_logits`.
    """
    batch, query_heads, new, _ = queries.shape
    slots = keys.shape[2]
    older, window = slots - new, sliding_window if columns else None
    width = slots if window is None else min(slots, window + ROWS_OF_A_WINDOW)
    at_once = max(1, PAIRS_AT_ONCE // (batch * query_heads * width))
    if window is not None:
        at_once = min(at_once, ROWS_OF_A_WINDOW)
    outs = []
    for first in range(0, new, at_once):
        end = min(first + at_once, new)
        reach = slice(0 if window is None else max(0, older + first + 1 - window), older + end if columns else slots)
        here = queries[:, :, first:end], keys[:, :, reach], values[:, :, reach]
        seen = visible(query_positions[:, first:end], key_positions[..., reach], sliding_window)
        added = None if bias is None else bias[..., reach]
        outs.append(_block(*here, seen, scaling, softcap, sinks, added))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def attention_behind(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """`masked_attention` of `columns`, without positions: one small mask for all heads; [B,H_q,M,D] -> [B,H_q,M,D']."""
    batch, heads, new, _ = queries.shape
    slots, group = keys.shape[2], heads // keys.shape[1]
    at_once, outs = max(1, PAIRS_AT_ONCE // (batch * heads * slots)), list[Tensor]()
    for some in queries.split(at_once, dim=2):
        end = slots - new + sum(out.shape[2] for out in outs) + some.shape[2]
        mask = _newest_rows(some.shape[2], end, group, queries.device)
        outs.append(grouped_attention(some, keys[:, :, :end], values[:, :, :end], mask, scaling))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


@lru_cache(maxsize=4)
def _newest_rows(new: int, slots: int, group: int, device: torch.device) -> Tensor:
    """The slots that the newest tokens see if the last slots are theirs: bool [1,1,group * new,slots]."""
    with torch.inference_mode(False):  # it is also used where gradients are computed
        return torch.ones(new, slots, dtype=torch.bool, device=device).tril(slots - new).repeat(1, 1, group, 1)


def _block(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float, softcap: float | None,
    sinks: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention under the mask seen [B,H_kv or 1,m,S]."""
    nothing = ~seen.any(-1)  # [B,H_kv or 1,m]
    readable = seen | nothing[..., None]  # a softmax over nothing is NaN: such rows are computed and set to 0
    if softcap is None and sinks is None and bias is None:
        out = grouped_attention(queries, keys, values, readable, scaling)
    else:
        logits = attention_logits(queries, keys, scaling, softcap, bias)
        logits = logits.masked_fill(~readable[:, :, None], -torch.inf)
        rows = logits.softmax(-1)
        if sinks is not None:
            rows = rows * sink_factor(logits.logsumexp(-1), sinks.view(1, *logits.shape[1:3], 1))[..., None]
        out = (rows.to(values.dtype) @ values[:, :, None]).flatten(1, 2)
    groups = queries.shape[1] // nothing.shape[1]
    return out.masked_fill(nothing.repeat_interleave(groups, dim=1)[..., None], 0.0)


def prompt_attention_ref(
    queries: Tensor, keys: Tensor, values: Tensor, query_positions: Tensor, key_positions: Tensor, scaling: float,
    softcap: float | None = None, sliding_window: int | None = None, sinks: Tensor | None = None,
) -> Attention:  # fmt: skip
    """The definition: that of `decode_attention`. Arguments and result as in `prompt_attention`."""
    call = queries, keys, values, query_positions, key_positions, scaling, softcap, sliding_window, sinks
    found = decode_attention_ref(*call)
    blind = (found.log_sum_exp == -torch.inf) | (query_positions < 0)[:, None]
    return Attention(found.out, found.log_sum_exp.masked_fill(blind, torch.inf))


def _library_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Attention | None:
    """Causal attention, queries being the newest tokens, by a fused kernel that returns its log-sum-exp, or None.

    For a whole prompt this is the kernel that PyTorch's own attention would choose, so that attention does not
    depend on whether a policy needs sums. For a block of a prompt it is flash attention with its causal mask
    aligned to the last query and the last slot. In float32 it is the memory-efficient kernel, for whole prompts.
    """
    group = queries.shape[1] // keys.shape[1]
    grouped = group > 1
    if queries.dtype == torch.float32:
        if queries.shape[2] != keys.shape[2]:
            return None
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # it takes no grouped heads
        params = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, True, False)
        if not torch.backends.cuda.can_use_efficient_attention(params):
            return None
        out, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, values, None, True, 0.0, True, scale=scaling
        )
        return Attention(out, log_sum_exp[..., : queries.shape[2]])  # padded to a multiple of 32
    if queries.shape[2] == keys.shape[2]:
        chosen: int | None = torch._fused_sdp_choice(
            queries, keys, values, None, 0.0, True, scale=scaling, enable_gqa=grouped
        )
    else:
        params = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, False, grouped)
        chosen = FLASH if torch.backends.cuda.can_use_flash_attention(params) else None
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


def block_mask(query_places: Tensor, key_places: Tensor, sliding_window: int | None) -> BlockMask:
    """The blocks of 128 queries by 128 slots that flex_attention computes, with a mask where needed.

    query_places [B,M], -1 = padding; key_places [B,H,T], -1 = empty; H = H_q or 1. It is computed from the oldest
    and newest place of each block, without a mask of all queries by all slots, and works for slots in any order.
    """
    new, (heads, slots) = query_places.shape[1], key_places.shape[1:]
    q = F.pad(query_places.long(), (0, -new % BLOCK), value=-1).unflatten(-1, (-1, BLOCK))[:, None, :, None]
    k = F.pad(key_places.long(), (0, -slots % BLOCK), value=-1).unflatten(-1, (-1, BLOCK))[:, :, None]
    newest_q, newest_k = q.amax(-1), k.amax(-1)  # [B,1,M/128,1], [B,H,1,T/128]
    oldest_q, oldest_k = (x.masked_fill(x < 0, NOWHERE).amin(-1) for x in (q, k))
    some = (newest_q >= 0) & (newest_k >= 0) & (oldest_k <= newest_q)
    whole = (q.amin(-1) >= 0) & (k.amin(-1) >= 0) & (newest_k <= oldest_q)
    if sliding_window is not None:
        some = some & (newest_k > oldest_q - sliding_window)
        whole = whole & (oldest_k > newest_q - sliding_window)
    parted = []
    for blocks in (some & ~whole, some & whole):
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        parted += [blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)]

    def seen(b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        q_place, k_place = query_places[b, query], key_places[b, h if heads > 1 else 0, slot]
        inside = (k_place >= 0) & (k_place <= q_place)
        return inside if sliding_window is None else inside & (k_place > q_place - sliding_window)

    return BlockMask.from_kv_blocks(
        parted[0],
        parted[1],
        parted[2],
        parted[3],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(new, slots),
        compute_q_blocks=False,
    )


@lru_cache(maxsize=1)
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """flex_attention compiled for any lengths; without compilation it builds all logits."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, backend=backend)
    constant: Callable[..., Any] = torch._dynamo.config.patch(CONSTANTS)(compiled)
    return constant


def flex_prompt_attention(
    queries: Tensor, keys: Tensor, values: Tensor, query_positions: Tensor, key_positions: Tensor, scaling: float,
    softcap: float | None = None, sliding_window: int | None = None, sinks: Tensor | None = None,
    aligned: bool = False,
) -> Attention:  # fmt: skip
    """`prompt_attention` by flex_attention, compiled on a GPU; on a CPU all logits exist at once."""
    dtype = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), values.dtype)
    q, k, v = (x.to(dtype) for x in (queries, keys, values))
    new, slots, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if aligned:
        places = torch.arange(slots, device=q.device)
        query_positions, key_positions = places[slots - new :].expand(len(q), -1), places.expand(len(q), 1, -1)
    elif key_positions.shape[1] > 1:
        key_positions = key_positions.repeat_interleave(group, dim=1)
    mask = block_mask(query_positions, key_positions, sliding_window)

    cap = 1.0 if softcap is None else softcap

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    attend: Any = compiled_flex() if on_gpu(q.device) else flex_attention
    out, aux = attend(
        q, k, v, score_mod=None if softcap is None else capped, block_mask=mask, scale=scaling, enable_gqa=group > 1,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    log_sum_exp = aux.lse
    blind = log_sum_exp == -torch.inf
    if sinks is not None:
        padding = (query_positions < 0)[:, None]
        out = out * sink_factor(log_sum_exp, sinks[:, None])[..., None].to(out.dtype)
        log_sum_exp = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
        log_sum_exp = log_sum_exp.masked_fill(padding, -torch.inf)
    out = out.masked_fill(blind[..., None], 0.0)
    return Attention(out.to(values.dtype), log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf))


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
    padding, empty slot. sinks [H_q]: logits that are part of the softmax but not of the output. aligned: every slot is
    occupied, in order of position in every sequence, the queries are the tokens of the last M slots, and a sliding
    window counts slots; positions are then not read. A query that sees nothing, not even a sink, has output 0 and
    log-sum-exp +inf, so that its weights are 0. CUDA: a fused kernel of PyTorch, otherwise flex_attention, or PyTorch
    where that has no kernel. CPU, float64: PyTorch.
    """
    call, dim = (scaling, softcap, sliding_window, sinks), queries.shape[-1]
    inside = sliding_window is None or sliding_window >= keys.shape[2]
    plain = aligned and inside and softcap is None and sinks is None
    if plain and on_gpu(queries.device) and queries.dtype != torch.float64:
        out = _library_attention(queries, keys, values, scaling)
        if out is not None:
            return out
    if on_gpu(queries.device) and queries.element_size() == 2 and min(dim, values.shape[-1]) >= SMALLEST_FLEX_HEAD:
        return flex_prompt_attention(queries, keys, values, query_positions, key_positions, *call, aligned)
    pairs = queries.shape[0] * queries.shape[1] * keys.shape[2]
    at_once = max(1, numbers_at_once(queries, LOGITS_AT_ONCE) // pairs)
    parts = zip(queries.split(at_once, 2), query_positions.split(at_once, 1), strict=True)
    some = [prompt_attention_ref(q, keys, values, at, key_positions, *call) for q, at in parts]
    return Attention(torch.cat([part.out for part in some], 2), torch.cat([part.log_sum_exp for part in some], 2))

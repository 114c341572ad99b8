# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of the newest queries over the stored slots, and in the same pass what an eviction asks of it.

The slots of a KV head are split over programs (flash-decoding, Dao et al. 2023); a second launch joins them. Where
weights are asked for, the first leaves its logits (4 G bytes a slot, beside 4 D of keys and values in 16 bits) and the
second makes them weights: keys are read once.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, N flat slots of all segments,
D head dim of queries and keys, D_v of values. Logits are in base 2 (GPUs have exp2 in hardware), results in base e.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import attention_logits, visible, widen
from kvbench.kernels.jit import fit_heads, jit, next_power_of_two, require_triton, tl, use_triton
from kvbench.kernels.join_splits import finish
from kvbench.kernels.prompt_tiles import capped, scale_and_cap

MOST_SPLITS = 128


class Attention(NamedTuple):
    """out [B,H_q,M,D_v] as the values are; log_sum_exp [B,H_q,M] float32; weights [B,H_kv,G,M,T] float32 or None.

    log_sum_exp is the natural logarithm of what divides the weights, the sink's share included. A query that sees
    nothing gets out 0 and weights 0; its log_sum_exp is that of its sink alone, -inf without one.
    """

    out: Tensor
    log_sum_exp: Tensor
    weights: Tensor | None


def decode_attention_ref(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    packed: bool = False,
    weights: bool = False,
    sums: Tensor | None = None,
) -> Attention:
    """The definition: all rows at once in float32. Arguments and result as in `decode_attention`."""
    logits = attention_logits(queries, keys, scaling, softcap)
    if not packed:
        assert query_positions is not None
        assert key_positions is not None
        seen = visible(query_positions, key_positions, sliding_window)  # [B,H_kv,M,T]
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        values = values.masked_fill((key_positions < 0)[..., None], 0.0)  # whatever an empty slot holds: weight 0
    all_logits = logits
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        all_logits = torch.cat([logits, sink], dim=-1)
    log_sum_exp = all_logits.logsumexp(-1)
    rows = (logits - log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)[..., None]).exp()
    if sums is not None:
        drawn = rows.sum(3).transpose(-1, -2)  # [B,H_kv,T,G]
        sums += drawn if sums.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)
    out = (rows @ widen(values)[:, :, None]).flatten(1, 2).to(values.dtype)
    return Attention(out, log_sum_exp.flatten(1, 2), rows if weights else None)


@jit
def _tile(
    rows: tl.tensor, there: tl.tensor, stride: tl.tensor, start: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Numbers start.. of the heads at pointers `rows`: [n,BLOCK_D], 0 where there is nothing."""
    dims = start + tl.arange(0, BLOCK_D).to(tl.int64)
    return tl.load(rows[:, None] + dims[None, :] * stride, mask=there[:, None] & (dims < D)[None, :], other=0.0)


@partial(jit, varying=("T", "window"))
def _attend_split(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    q_dim: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    k_dim: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    v_dim: tl.tensor,
    q_pos_batch: tl.tensor,
    q_pos_row: tl.tensor,
    k_pos_batch: tl.tensor,
    k_pos_head: tl.tensor,
    k_pos_row: tl.tensor,
    H_kv: tl.tensor,
    G: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    PLACED: tl.constexpr,
    FLAT: tl.constexpr,
    SUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    LOGITS: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    WHOLE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program: attention of ROWS of a KV head's G * M query rows over its share of the slots, and the lse there."""
    kv_row = tl.program_id(0).to(tl.int64)  # of B * H_kv
    split, splits = tl.program_id(1), tl.num_programs(1)
    batch, head = kv_row // H_kv, kv_row % H_kv
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # row g * M + m: query m of query head g of the group
    there = rows < G * M
    q_rows = q_ptr + batch * q_batch + (head * G + rows // M) * q_head + (rows % M).to(tl.int64) * q_row
    q = _tile(q_rows, there, q_dim, 0, D, BLOCK_D)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    length = T
    if FLAT:
        first = tl.load(starts_ptr + kv_row).to(tl.int64)
        length = tl.load(counts_ptr + kv_row).to(tl.int32)
        k_ptr += first * k_row
        v_ptr += first * v_row
    if PLACED:
        k_pos_ptr += batch * k_pos_batch + head * k_pos_head
        if FLAT:
            k_pos_ptr += first * k_pos_row
        q_pos = tl.load(q_pos_ptr + batch * q_pos_batch + rows % M * q_pos_row, mask=there, other=-1).to(tl.int32)
        newest = tl.max(q_pos, 0)
        oldest = tl.min(tl.where(q_pos < 0, 2**30, q_pos), 0)
    # In base 2. The sink is counted once: by the first split, where it stands like a slot without a value.
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if SUNK:
        sink = tl.load(sinks_ptr + head * G + rows // M, mask=there, other=float("-inf")).to(tl.float32)
        top = tl.where(split == 0, sink * 1.4426950408889634, float("-inf"))
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_T), splits) * BLOCK_T
    begin = split * share
    end = tl.minimum(begin + share, length)
    for step in range(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T)):
        slots = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)
        wide = slots.to(tl.int64)
        needed = slots < end
        if PLACED:  # what no query of this tile may see is not even read
            k_pos = tl.load(k_pos_ptr + wide * k_pos_row, mask=needed, other=-1).to(tl.int32)
            needed = (k_pos >= 0) & (k_pos <= newest)
            if WINDOWED:
                needed = needed & (k_pos > oldest - window)
        k_rows = k_ptr + wide * k_row
        logits = tl.dot(q, tl.trans(_tile(k_rows, needed, k_dim, 0, D, BLOCK_D)), input_precision="ieee")
        for start in tl.static_range(BLOCK_D, WHOLE_D, BLOCK_D):
            more = tl.trans(_tile(k_rows, needed, k_dim, start, D, BLOCK_D))
            logits = tl.dot(_tile(q_rows, there, q_dim, start, D, BLOCK_D), more, logits, input_precision="ieee")
        logits = capped(logits, scale, cap, CAPPED)
        seen = needed[None, :]
        if PLACED:
            seen = seen & (k_pos[None, :] <= q_pos[:, None])
            if WINDOWED:
                seen = seen & (k_pos[None, :] > q_pos[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        if LOGITS:
            at = logits_ptr + (kv_row * G * M + rows)[:, None] * T + wide[None, :]
            tl.store(at, logits, mask=there[:, None] & (slots < end)[None, :])
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, 1)
        v = _tile(v_ptr + wide * v_row, needed, v_dim, 0, D_V, BLOCK_V)
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
        top = new_top
    counted = tl.where(total > 0, total, 1.0)
    place = (kv_row * G * M + rows) * splits + split
    tl.store(lse_ptr + place, (top + tl.log2(counted)) * 0.6931471805599453, mask=there)
    dims = tl.arange(0, BLOCK_V)
    at = out_ptr + place[:, None] * D_V + dims[None, :]
    out = (out / counted[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(at, out, mask=there[:, None] & (dims < D_V)[None, :])


def tiles(rows: int, dim: int, value_dim: int, dtype: torch.dtype, placed: bool) -> dict[str, int]:
    """Tile sizes and launch options for `rows` query rows per KV head: no spills, at most 99 KiB of shared memory.

    16-bit keys and values: 16 KiB of each at a time, two tiles on their way (four half as wide). Where positions are
    read first, which say what need not be read (placed), it takes twice the stages to be as far ahead. float32 in full
    precision is summed by ordinary cores, some dimensions at a time.
    """
    whole, wide = max(16, next_power_of_two(dim)), max(16, next_power_of_two(value_dim))
    warps = 4 if max(whole, wide) <= 128 else 8
    if dtype == torch.float32:
        sizes = {
            "WHOLE_D": max(32, whole),
            "BLOCK_D": 32 if warps == 4 else 16,
            "BLOCK_V": wide,
            "ROWS": 16,
            "BLOCK_T": 16,
        }
        return {**sizes, "num_warps": warps, "num_stages": 2}
    most_rows = 32 if max(whole, wide) <= 128 else 16
    slots = max(16, min(64, 8192 // max(whole, wide)))
    ahead = 2 if max(whole, wide) > 64 else 4
    sizes = {"WHOLE_D": whole, "BLOCK_D": whole, "BLOCK_V": wide, "BLOCK_T": slots}
    fitting = min(most_rows, max(16, next_power_of_two(rows)))
    return {**sizes, "ROWS": fitting, "num_warps": warps, "num_stages": 1 + 2 * ahead if placed else 1 + ahead}


@lru_cache(maxsize=4096)
def splits_for(programs: int, blocks: int, at_once: int) -> int:
    """Into how many parts the `blocks` tiles of a KV head are split, of which a device runs `at_once` together.

    The fewest whose longest chain of tiles, one wave of programs after another, is within 1/16 of the shortest.
    """

    def chain(splits: int) -> int:
        return -(-programs * splits // at_once) * -(-blocks // splits)

    choices = range(1, max(1, min(blocks, MOST_SPLITS)) + 1)
    shortest = min(map(chain, choices))
    return next(splits for splits in choices if 16 * chain(splits) <= 17 * shortest)


@lru_cache(maxsize=64)
def programs_at_once(device: torch.device) -> int:
    """Programs a device runs together: two per SM, by the shared memory they take; the interpreter is given a few."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
    heads: int,
    slots: int,
    how: tuple[float, float | None, int | None, Tensor | None],
    weights: bool,
    sums: Tensor | None,
    splits: int | None,
) -> Attention:
    """Both launches; how: scaling, softcap, sliding_window, sinks. Without positions every query sees every slot.

    keys, values and key_positions are [B,H_kv,T,...], or flat [N,...] with segments = starts, counts and slots = most.
    """
    require_triton("decode_attention", queries.device)
    _check(queries, keys, values, heads, sums)
    kept, (batch, query_heads, new, dim) = values.dtype, queries.shape
    if not queries.is_cuda and kept == torch.bfloat16:
        # Triton's interpreter multiplies the bit patterns of bfloat16 (3.9); these are its values
        queries, keys, values = queries.float(), keys.float(), values.float()
    scaling, softcap, sliding_window, sinks = how
    group, value_dim = query_heads // heads, values.shape[-1]
    placed = query_positions is not None and key_positions is not None
    sizes = tiles(group * new, dim, value_dim, keys.dtype, placed)
    row_tiles = -(-group * new // sizes["ROWS"])
    if splits is None:
        blocks = -(-slots // sizes["BLOCK_T"])
        splits = splits_for(batch * heads * row_tiles, blocks, programs_at_once(queries.device))
    scored = weights or sums is not None
    parts = values.new_empty(
        batch, query_heads, new, splits, value_dim, dtype=values.dtype if splits == 1 else torch.float32
    )
    parts_lse = values.new_empty(batch, query_heads, new, splits, dtype=torch.float32)
    logits = parts_lse.new_empty(batch, heads, group, new, slots) if scored else None
    starts, counts = (None, None) if segments is None else segments
    flat = () if segments is None else (0, 0)
    places = (0,) * 5
    if query_positions is not None and key_positions is not None:
        places = *query_positions.stride(), *flat, *key_positions.stride()
    with torch.cuda.device_of(queries):
        _attend_split[batch * heads, splits, row_tiles](
            queries, keys, values, query_positions, key_positions, starts, counts, sinks, logits, parts, parts_lse,
            *queries.stride(), *flat, *keys.stride(), *flat, *values.stride(), *places,
            heads, group, new, slots, *scale_and_cap(scaling, softcap), sliding_window or 0,
            PLACED=placed, FLAT=segments is not None, SUNK=sinks is not None, CAPPED=softcap is not None,
            WINDOWED=sliding_window is not None, LOGITS=scored, D=dim, D_V=value_dim, **sizes,
        )  # fmt: skip
        out, log_sum_exp = finish(parts, parts_lse, logits, segments, heads, weights, sums, values.dtype)
    return Attention(out.to(kept), log_sum_exp, logits if weights else None)


def _check(queries: Tensor, keys: Tensor, values: Tensor, heads: int, sums: Tensor | None) -> None:
    """ValueError for what the kernel cannot compute."""
    fit_heads("decode_attention", keys.shape[-1], values.shape[-1])
    dtypes = {queries.dtype, keys.dtype, values.dtype}
    if len(dtypes) > 1:
        raise ValueError(
            f"decode_attention takes queries, keys and values of one dtype, got {sorted(map(str, dtypes))}"
        )
    if queries.dtype == torch.float64:
        raise ValueError("decode_attention sums in float32 and takes no float64 tensors: use decode_attention_ref")
    group = queries.shape[1] // heads
    if sums is not None and (sums.dtype != torch.float32 or sums.shape[-1] not in (1, group)):
        raise ValueError(f"sums must be float32 [...,{group}] or [...,1], got {sums.dtype} {list(sums.shape)}")


@torch.no_grad()
def decode_attention_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    packed: bool = False,
    weights: bool = False,
    sums: Tensor | None = None,
    splits: int | None = None,
) -> Attention:
    """`decode_attention` in one launch, or two where slots are split or weights or sums asked for. Any strides.

    splits: into how many parts the slots of a KV head go, chosen from the shapes where None. ValueError for float64,
    mixed dtypes and where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do.
    """
    assert packed or (query_positions is not None and key_positions is not None)
    if packed:
        query_positions = key_positions = sliding_window = None
    how = scaling, softcap, sliding_window, sinks
    return launch(
        queries, keys, values, query_positions, key_positions, None, keys.shape[1], keys.shape[2], how, weights, sums,
        splits,
    )  # fmt: skip


def decodes(queries: Tensor) -> bool:
    """Whether a step of queries [B,H_q,M,D] goes through the kernel: one query, where Triton runs, no gradients."""
    return queries.shape[2] == 1 and use_triton(queries) and not (torch.is_grad_enabled() and queries.requires_grad)


def decode_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    packed: bool = False,
    weights: bool = False,
    sums: Tensor | None = None,
) -> Attention:
    """Attention of a few queries over the stored slots, and what an eviction reads of it, in one pass over the keys.

    queries [B,H_q,M,D], M small, over keys [B,H_kv,T,D] and values [B,H_kv,T,D_v]; query_positions [B,M] and
    key_positions [B,H_kv,T] are original positions, which causality compares, -1 = padding, empty slot. packed: every
    query sees every slot; positions and sliding_window are not read. sinks [H_q]: a logit per query head that takes its
    share of the softmax and adds nothing to the output. weights: return them. sums [B,H_kv,T,G or 1] float32: what each
    slot drew from the queries is added there in place, per query head or as the mean over a group.
    CUDA: Triton, ValueError without it. CPU, float64: the reference.
    """
    attend = decode_attention_triton if use_triton(queries) else decode_attention_ref
    return attend(
        queries, keys, values, query_positions, key_positions, scaling, softcap, sliding_window, sinks, packed,
        weights, sums,
    )  # fmt: skip

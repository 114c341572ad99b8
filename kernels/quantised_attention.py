# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Attention of one new query per sequence on packed codes, a tail in full precision and exact outlier tokens.

Tokens are split over programs (flash-decoding, Dao et al. 2023) and the parts joined by their log-sum-exp. No
dequantised tensor is ever written. Two kernels share the tokens of a KV head: `_groups` takes whole groups of which
keys and values both are codes (quantised_groups.py), `_tokens` the rest in any layout; a third launch joins the parts.

Shapes: B batch, H KV heads, G query heads per KV head, N tokens in codes, R tokens of a tail, E outlier entries, S
parts, U tokens (or channels) of a group, D head dim of keys, D_v of values, W int32 words of a group.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import fit_heads, jit, next_power_of_two, require_triton, tl
from kvbench.kernels.join_splits import finish
from kvbench.kernels.packed import Packed, Side
from kvbench.kernels.prompt_tiles import scale_and_cap, softcapped
from kvbench.kernels.quantised_groups import groups_launch, serves

ROWS = 16  # query heads of a KV head, filled up: the fewest rows tensor cores take
TAIL_PARTS = 8  # programs that share what is left of a KV head beside its whole groups


class Outliers(NamedTuple):
    """Exact keys [B,H,E,D] and values [B,H,E,D_v] that stand in for the tokens at slots [B,H,E] int32; -1 = empty."""

    keys: Tensor
    values: Tensor
    slots: Tensor


class Attention(NamedTuple):
    """out [B,H_q,1,D_v] in the queries' dtype; log_sum_exp [B,H_q,1] float32, natural. A query at -1: 0 and -inf."""

    out: Tensor
    log_sum_exp: Tensor


def quantised_attention_ref(
    queries: Tensor,
    query_positions: Tensor,
    keys: Side,
    values: Side,
    scaling: float,
    softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:
    """The definition: dequantise, put the outliers in their places, attend in float32."""
    k, v = (_in_order(side) for side in (keys, values))
    seen = torch.arange(k.shape[2], device=k.device) < keys.lengths()[..., None]  # [B,H,C]
    if outliers is not None:
        for b, h, e in (outliers.slots >= 0).nonzero().tolist():
            slot = outliers.slots[b, h, e]
            k[b, h, slot], v[b, h, slot] = outliers.keys[b, h, e].float(), outliers.values[b, h, e].float()
    batch, query_heads, new, dim = queries.shape
    rows = queries.float().reshape(batch, k.shape[1], -1, dim)
    logits = rows @ k.transpose(-1, -2) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~(seen & (query_positions >= 0)[..., None])[:, :, None], -torch.inf)
    log_sum_exp = logits.logsumexp(-1)
    out = (logits - log_sum_exp[..., None]).exp().nan_to_num(0.0) @ v
    return Attention(out.view(batch, query_heads, new, -1).to(queries.dtype), log_sum_exp.view(batch, query_heads, new))


def _in_order(side: Side) -> Tensor:
    """[B,H,C,D] float32: each head's codes, then its tail, closed up; 0 beyond."""
    coded, tail = side.packed.dequantised(), side.tail.float()
    x = tail.new_zeros(*tail.shape[:2], int(side.lengths().max()), tail.shape[3])
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in tail.shape[:2])).view(-1, 2).tolist():
        first, last = int(side.coded()[b, h]), int(side.lengths()[b, h])
        x[b, h, :first] = coded[b, h, :first]
        x[b, h, first:last] = tail[b, h, : last - first]
    return x


@jit
def _dequantised(
    words: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    word_entry: tl.tensor,
    meta_entry: tl.tensor,
    token: tl.tensor,
    dims: tl.tensor,
    there: tl.tensor,
    BITS: tl.constexpr,
    U: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> tl.tensor:
    """Tokens [T,1] by dims [1,D] where `there`, from one KV head's codes, each entry's words and scales together."""
    if PER_TOKEN:
        entry, group, place = token, dims // U, dims % U
    else:
        entry, group, place = token // U, dims, token % U
    bit = place * BITS
    word = tl.load(words + entry * word_entry + group * WIDTH + bit // 32, mask=there, other=0)
    code = (word >> bit % 32) & ((1 << BITS) - 1)
    step = tl.load(scale + entry * meta_entry + group, mask=there, other=0.0).to(tl.float32)
    return code.to(tl.float32) * step + tl.load(minimum + entry * meta_entry + group, mask=there, other=0.0).to(
        tl.float32
    )


@jit
def _exact(base: tl.tensor, token_stride: tl.tensor, token: tl.tensor, dims: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Tokens [T,1] by dims [1,D] where `there`, from one KV head's tensor in full precision, as float32."""
    return tl.load(base + token * token_stride + dims, mask=there, other=0.0).to(tl.float32)


@partial(jit, varying=("key_coded", "value_coded", "length", "begin"))
def _tokens(
    q_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    kw_ptr: tl.tensor,
    ks_ptr: tl.tensor,
    km_ptr: tl.tensor,
    vw_ptr: tl.tensor,
    vs_ptr: tl.tensor,
    vm_ptr: tl.tensor,
    kt_ptr: tl.tensor,
    vt_ptr: tl.tensor,
    ke_ptr: tl.tensor,
    ve_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    kw_batch: tl.tensor,
    kw_head: tl.tensor,
    kw_entry: tl.tensor,
    km_batch: tl.tensor,
    km_head: tl.tensor,
    km_entry: tl.tensor,
    vw_batch: tl.tensor,
    vw_head: tl.tensor,
    vw_entry: tl.tensor,
    vm_batch: tl.tensor,
    vm_head: tl.tensor,
    vm_entry: tl.tensor,
    kt_batch: tl.tensor,
    kt_head: tl.tensor,
    kt_token: tl.tensor,
    vt_batch: tl.tensor,
    vt_head: tl.tensor,
    vt_token: tl.tensor,
    key_coded: tl.tensor,
    value_coded: tl.tensor,
    length: tl.tensor,
    begin: tl.tensor,
    H: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    E: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_PER_TOKEN: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PER_TOKEN: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program: every num_programs(1)-th block of one KV head's tokens from `begin` on, and of its outliers."""
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part = tl.program_id(1)
    batch, head = row // H, row % H
    if not EVEN:  # [3,B*H]: keys in codes, values in codes, all
        rows = tl.num_programs(0)
        key_coded = tl.load(lengths_ptr + row)
        value_coded = tl.load(lengths_ptr + rows + row)
        length = tl.load(lengths_ptr + 2 * rows + row)
        begin = tl.minimum(key_coded, value_coded) // WHOLE * WHOLE
    kw_ptr += batch * kw_batch + head * kw_head
    ks_ptr += batch * km_batch + head * km_head
    km_ptr += batch * km_batch + head * km_head
    vw_ptr += batch * vw_batch + head * vw_head
    vs_ptr += batch * vm_batch + head * vm_head
    vm_ptr += batch * vm_batch + head * vm_head
    kt_ptr += batch * kt_batch + head * kt_head
    vt_ptr += batch * vt_batch + head * vt_head
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q_ptr += batch * q_batch + (head * G + heads)[:, None].to(tl.int64) * q_head
    q = tl.load(q_ptr + dims[None, :], mask=(heads < G)[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    q *= scale
    covered = tl.arange(0, BLOCK_E)
    if E > 0:
        covered = tl.load(slots_ptr + row * E + covered, mask=covered < E, other=-1)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, BLOCK_DV], tl.float32)
    blocks = tl.cdiv(length + E - begin, BLOCK_T)
    blocks = tl.where(tl.load(q_pos_ptr + batch) >= 0, blocks, 0)  # a padded sequence asks nothing
    for step in range(part, blocks, tl.num_programs(1)):
        at = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)  # slots; behind the last one, the outliers
        token = at.to(tl.int64)[:, None]
        seen = at < length
        dim, dim_v = dims[None, :], dims_v[None, :]
        coded = (at < key_coded)[:, None] & (dim < D)
        exact = ((at >= key_coded) & seen)[:, None] & (dim < D)
        k = _dequantised(kw_ptr, ks_ptr, km_ptr, kw_entry, km_entry, token, dim, coded,
                         KEY_BITS, KEY_UNIT, KEY_WIDTH, KEY_PER_TOKEN)  # fmt: skip
        k += _exact(kt_ptr, kt_token, token - key_coded, dim, exact)
        coded_v = (at < value_coded)[:, None] & (dim_v < D_V)
        exact_v = ((at >= value_coded) & seen)[:, None] & (dim_v < D_V)
        v = _dequantised(vw_ptr, vs_ptr, vm_ptr, vw_entry, vm_entry, token, dim_v, coded_v,
                         VALUE_BITS, VALUE_UNIT, VALUE_WIDTH, VALUE_PER_TOKEN)  # fmt: skip
        v += _exact(vt_ptr, vt_token, token - value_coded, dim_v, exact_v)
        if E > 0:
            seen = seen & (tl.sum((at[:, None] == covered[None, :]).to(tl.int32), 1) == 0)
            entry = at - length
            inside = (entry >= 0) & (entry < E)
            slot = tl.load(slots_ptr + row * E + entry, mask=inside, other=-1)
            seen = seen | (slot >= 0)
            place = row * E + entry.to(tl.int64)[:, None]
            k += _exact(ke_ptr, D, place, dim, inside[:, None] & (dim < D))
            v += _exact(ve_ptr, D_V, place, dim_v, inside[:, None] & (dim_v < D_V))
        logits = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if CAPPED:
            logits = softcapped(logits, cap)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - shift[:, None])
        faded = tl.exp2(top - shift)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None] + tl.dot(weights, v, input_precision="tf32x3")
        top = new_top
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453  # -inf of nothing
    place = (row * G + heads) * parts + first_part + part
    tl.store(lse_ptr + place, lse, mask=heads < G)
    tl.store(out_ptr + place[:, None] * D_V + dims_v[None, :], out, mask=(heads < G)[:, None] & (dims_v < D_V)[None, :])


def tiles(dim: int, value_dim: int, rows: int) -> dict[str, int]:
    """Tile sizes and launch options of `_tokens`: at most 99 KiB of shared memory.

    Spills: none at the main shapes, 16 bytes a thread at most up to D = 128 and 4 bits (Triton 3.6 and 3.9).
    """
    wide = max(16, next_power_of_two(dim)), max(16, next_power_of_two(value_dim))
    return {
        "BLOCK_T": 32 if max(wide) <= 128 else 16,
        "BLOCK_D": wide[0],
        "BLOCK_DV": wide[1],
        "PADDED": max(ROWS, next_power_of_two(rows)),
        "num_warps": 4 if max(wide) < 128 else 8,
        "num_stages": 1,
    }


def quantised_attention_triton(
    queries: Tensor,
    query_positions: Tensor,
    keys: Side,
    values: Side,
    scaling: float,
    softcap: float | None = None,
    outliers: Outliers | None = None,
) -> Attention:
    """Attention of one query per sequence in up to three launches.

    queries [B,H_q,1,D], query_positions [B,1] (-1: padding). Every token held is in view of the query. Results are
    within float32's rounding of the reference; the order of sums differs. ValueError where Triton is missing. Under
    TRITON_INTERPRET=1 CPU tensors will do.
    """
    require_triton("quantised_attention", queries.device)
    batch, query_heads, new, dim = queries.shape
    assert new == 1, "one query per sequence"
    heads, value_dim = values.tail.shape[1], values.tail.shape[3]
    fit_heads("quantised_attention", dim, value_dim)
    group, rows = query_heads // heads, batch * heads
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    keys, values, outliers = _readable(keys), _readable(values), None if outliers is None else _solid(outliers)
    even = keys.even and values.even
    coded = keys.packed.tokens, values.packed.tokens
    lengths = queries.new_empty(1, dtype=torch.int32)
    if not even:
        lengths = torch.stack([keys.coded(), values.coded(), keys.lengths()]).to(torch.int32).contiguous()
    whole = keys.packed.unit if serves(keys.packed, values.packed, group, dim, value_dim) else 0
    group_parts = _group_parts(rows, min(coded) // whole) if whole else 0
    scale, cap = scale_and_cap(scaling, softcap)
    begin = min(coded) // whole * whole if whole else 0
    longest = keys.packed.tokens + keys.tail.shape[2]
    entries = 0 if outliers is None else outliers.slots.shape[2]
    how = tiles(dim, value_dim, group)
    left = -(-(longest + entries - (begin if even else 0)) // how["BLOCK_T"])
    tail_parts = max(1, min(TAIL_PARTS if whole else _group_parts(rows, left), left))
    parts = group_parts + tail_parts
    part_out = queries.new_empty(
        batch, query_heads, 1, parts, value_dim, dtype=queries.dtype if parts == 1 else torch.float32
    )
    part_lse = queries.new_empty(batch, query_heads, 1, parts, dtype=torch.float32)
    query_positions = query_positions.contiguous()
    slots = lengths if outliers is None else outliers.slots
    capped = softcap is not None
    with torch.cuda.device_of(queries):
        if group_parts:
            groups_launch(
                queries, query_positions, keys.packed, values.packed, slots, lengths, part_out, part_lse, group_parts,
                min(coded), entries, even, scale, cap, capped,
            )  # fmt: skip
        _tokens[rows, tail_parts](
            queries, query_positions, keys.packed.words, keys.packed.scale, keys.packed.minimum,
            values.packed.words, values.packed.scale, values.packed.minimum, keys.tail, values.tail,
            keys.tail if outliers is None else outliers.keys, values.tail if outliers is None else outliers.values,
            slots, lengths, part_out, part_lse,
            *queries.stride()[:2], *keys.packed.words.stride()[:3], *keys.packed.scale.stride()[:3],
            *values.packed.words.stride()[:3], *values.packed.scale.stride()[:3],
            *keys.tail.stride()[:3], *values.tail.stride()[:3],
            *coded, longest, begin, heads, parts, group_parts, scale, cap,
            G=group, D=dim, D_V=value_dim, E=entries,
            **_layout("KEY", keys.packed), **_layout("VALUE", values.packed),
            WHOLE=whole or 2**30, EVEN=even, CAPPED=capped, BLOCK_E=next_power_of_two(max(entries, 1)), **how,
        )  # fmt: skip
        out, log_sum_exp = finish(part_out, part_lse, None, None, heads, False, None, queries.dtype)
    return Attention(out, log_sum_exp)


def _group_parts(rows: int, steps: int) -> int:
    """Programs per KV head for its `steps` blocks: of 4 blocks or more, unless that leaves multiprocessors idle.

    132 of them (H100, H200) hold 8 programs of one warp each, by their registers; four times as many balance the end.
    """
    resident = 8 * 132
    return min(-(-4 * resident // rows), max(-(-steps // 4), min(steps, -(-resident // rows))))


def _layout(side: str, packed: Packed) -> dict[str, int]:
    names = {"BITS": packed.bits, "UNIT": packed.unit, "WIDTH": packed.words.shape[-1], "PER_TOKEN": packed.per_token}
    return {f"{side}_{name}": value for name, value in names.items()}


def _readable(side: Side) -> Side:
    """The same with the numbers of a token, and the words of an entry, side by side."""
    packed, tail = side.packed, side.tail
    entry = packed.words.shape[3:]
    words, scale, minimum = packed.words, packed.scale, packed.minimum
    if words.stride()[3:] != (entry[1], 1):
        words = words.contiguous()
    if scale.stride() != minimum.stride() or scale.stride(-1) != 1:
        scale, minimum = scale.contiguous(), minimum.contiguous()
    tail = tail if tail.stride(-1) == 1 else tail.contiguous()
    packed = Packed(words, scale, minimum, packed.bits, packed.unit, packed.per_token, packed.counts)
    return Side(packed, tail, side.counts)


def _solid(outliers: Outliers) -> Outliers:
    return Outliers(*(x.contiguous() for x in outliers))

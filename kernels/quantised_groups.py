# ruff: noqa: N803, N806 - in kernels, sizes have the names they have in shapes
"""Attention on whole groups of packed codes: keys per channel, values per token with one scale each.

What counts is arithmetic per code: at 2 bits a GPU's memory brings 8 to 17 codes a nanosecond, which leaves about two
instructions each. So codes are never converted. A 16-bit half of a word, masked to one code, is read as a subnormal
float16: code * 2^(place of its lowest bit) * 2^-24, exactly. Tensor cores multiply subnormals at full speed; the power
of two is taken out of the product. One mask serves two codes, one shift eight of them. The other side, queries times a
group's scales or weights times the tokens' scales, is the sum of two float16 numbers, the second what the first leaves
out: 22 bits, as good as float32's 24 here. Both are rows of one product, whose 16 rows a few queries would not fill.

Shapes: B batch, H KV heads, G query heads per KV head (at most 8), U tokens of a group, D head dim of keys, D_v of
values, F = 16 / bits codes per half word, L = U / F half words of a key channel, L_v of a value token, S parts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.jit import INTERPRETED, jit, next_power_of_two, tl
from kvbench.kernels.packed import Packed
from kvbench.kernels.prompt_tiles import softcapped

HALF = 16  # bits
LOUD = 2.0**12  # the largest number of the side that is not codes: products and sums stay inside float16's range


@jit
def _codes(halves: tl.tensor, PLANE: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr) -> tl.tensor:
    """Code PLANE of int16 halves, as float16: times 2^(BITS * (PLANE % (8 / BITS)) - 24). PAIRS: two an instruction."""
    HIGH: tl.constexpr = PLANE * BITS // 8 * 8
    MASK: tl.constexpr = ((1 << BITS) - 1) << (PLANE * BITS % 8)
    if not PAIRS:
        return ((halves >> HIGH) & MASK).to(tl.float16, bitcast=True)
    if HIGH == 0:
        return tl.inline_asm_elementwise(
            f"and.b32 $0, $1, {MASK * 65537};", "=r,r", [halves], dtype=tl.float16, is_pure=True, pack=2
        )
    return tl.inline_asm_elementwise(  # what the upper half shifts into the lower one is masked away
        f"{{ .reg .b32 low; shr.b32 low, $1, 8; and.b32 $0, low, {MASK * 65537}; }}",
        "=r,r",
        [halves],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@jit
def _in_two(x: tl.tensor, JOIN: tl.constexpr) -> tl.tensor:
    """float32 [8,N] as float16 [16,N]: first the nearest, then what they leave out.

    JOIN or not is the same to the last bit; where x comes from memory or a product, the one or the other moves less.
    """
    if JOIN:
        near = x.to(tl.float16)
        rest = (x - near.to(tl.float32)).to(tl.float16)
        return tl.reshape(tl.permute(tl.join(near, rest), (2, 0, 1)), (16, x.shape[1]))
    twice = tl.broadcast_to(x[None, :, :], (2, 8, x.shape[1]))
    near = twice.to(tl.float16)
    rest = (twice - near.to(tl.float32)).to(tl.float16)
    return tl.reshape(tl.where(tl.arange(0, 2)[:, None, None] == 0, near, rest), (16, x.shape[1]))


@jit
def _plane(
    both: tl.tensor,
    halves: tl.tensor,
    factor: tl.tensor,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """x float32 [8,K] as `both` float16 [16,K] times code PLANE of every half word [K,N] times factor [8]: [8,N]."""
    products = tl.dot(both, _codes(halves, PLANE, BITS, PAIRS))
    together = tl.sum(tl.reshape(products, (2, 8, halves.shape[1])), 0)
    return together * (factor * (16777216.0 / (1 << (PLANE * BITS % 8))))[:, None]


@jit
def _products(
    x: tl.tensor,
    halves: tl.tensor,
    factor: tl.tensor,
    BITS: tl.constexpr,
    PLANES_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """x float32 [8,K] times the codes in int16 [K,N] times factor [8]: [8,F*N].

    In the order of the codes, F*n+f, or PLANES_FIRST, N*f+n: as such, results lie where the next product reads them.
    """
    b = _in_two(x, not PLANES_FIRST)
    F: tl.constexpr = 16 // BITS
    N: tl.constexpr = halves.shape[1]
    if F == 2:
        both = tl.join(_plane(b, halves, factor, 0, BITS, PAIRS), _plane(b, halves, factor, 1, BITS, PAIRS))
    elif F == 4:
        even = tl.join(_plane(b, halves, factor, 0, BITS, PAIRS), _plane(b, halves, factor, 2, BITS, PAIRS))
        odd = tl.join(_plane(b, halves, factor, 1, BITS, PAIRS), _plane(b, halves, factor, 3, BITS, PAIRS))
        both = tl.join(even, odd)
    else:
        zero = tl.join(_plane(b, halves, factor, 0, BITS, PAIRS), _plane(b, halves, factor, 4, BITS, PAIRS))
        two = tl.join(_plane(b, halves, factor, 2, BITS, PAIRS), _plane(b, halves, factor, 6, BITS, PAIRS))
        one = tl.join(_plane(b, halves, factor, 1, BITS, PAIRS), _plane(b, halves, factor, 5, BITS, PAIRS))
        three = tl.join(_plane(b, halves, factor, 3, BITS, PAIRS), _plane(b, halves, factor, 7, BITS, PAIRS))
        both = tl.join(tl.join(zero, two), tl.join(one, three))
    if PLANES_FIRST:
        both = tl.permute(tl.reshape(both, (8, N // 16, 2, 4, 2, F)), (0, 5, 1, 3, 2, 4))
    return tl.reshape(both, (8, F * N))


@jit
def _tokens_at(places: tl.tensor, F: tl.constexpr, HALVES: tl.constexpr) -> tl.tensor:
    """Which tokens of a group lie at these places of what `_products` gives with its planes first."""
    half = places % HALVES
    half = half // 16 * 16 + half // 2 % 2 * 8 + half % 16 // 4 * 2 + half % 2
    return half * F + places // HALVES


@jit
def _planes_first(x: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """[F*N] in the order of tokens as `_products` has them."""
    N: tl.constexpr = x.shape[0] // F
    return tl.reshape(tl.permute(tl.reshape(x, (N // 16, 2, 4, 2, F)), (4, 0, 2, 1, 3)), (F * N,))


@jit
def _widest(scale: tl.tensor) -> tl.tensor:
    """The largest of a group's scales, by which the others are divided; 1 where all are 0."""
    widest = tl.max(scale, 0)
    return tl.where(widest > 0, widest, 1.0)


@jit
def _logits(
    q: tl.tensor,
    loud: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Queries [8,D] times `loud` [8] with a group's keys, words [D,L] * scale [D] + least [D]: [8,U], planes first."""
    widest = _widest(scale)
    x = q * (scale * (TOP / widest))[None, :]
    products = _products(x, words, loud * (widest / TOP), BITS, True, PAIRS)
    return products + (tl.sum(q * least[None, :], 1) * loud)[:, None]


@jit
def _weighted(
    weights: tl.tensor, words: tl.tensor, scale: tl.tensor, BITS: tl.constexpr, TOP: tl.constexpr, PAIRS: tl.constexpr
) -> tl.tensor:
    """Weights [8,U] times a group's values without their minima, words [U,L_v] * scale [U]: [8,D_v]."""
    widest = _widest(scale)
    x = weights * (scale * (TOP / widest))[None, :]
    return _products(x, words, tl.zeros([8], tl.float32) + widest / TOP, BITS, False, PAIRS)


@jit
def _among(rows: tl.tensor, covered: tl.tensor) -> tl.tensor:
    """Which of the rows [U] are covered [E]."""
    return tl.max((rows[:, None] == covered[None, :]).to(tl.int32), 1) > 0  # a sum takes more registers


@partial(jit, varying=("coded", "groups_each"))
def _groups(
    q_ptr: tl.tensor,
    q_pos_ptr: tl.tensor,
    kw_ptr: tl.tensor,
    ks_ptr: tl.tensor,
    km_ptr: tl.tensor,
    vw_ptr: tl.tensor,
    vs_ptr: tl.tensor,
    vm_ptr: tl.tensor,
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
    coded: tl.tensor,
    groups_each: tl.tensor,
    H: tl.tensor,
    parts: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    E: tl.constexpr,
    U: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_HALVES: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """One program: `groups_each` consecutive groups of one KV head, for all its query heads."""
    KEY_F: tl.constexpr = 16 // KEY_BITS
    VALUE_F: tl.constexpr = 16 // VALUE_BITS
    HALVES: tl.constexpr = U // KEY_F
    row = tl.program_id(0).to(tl.int64)  # of B * H
    part = tl.program_id(1)
    batch, head = row // H, row % H
    if not EVEN:
        coded = tl.minimum(tl.load(lengths_ptr + row), tl.load(lengths_ptr + tl.num_programs(0) + row))
    first = part * groups_each
    steps = tl.minimum(groups_each, coded // U - first)
    steps = tl.where(tl.load(q_pos_ptr + batch) >= 0, steps, 0)  # a padded sequence asks nothing
    heads = tl.arange(0, 8)
    dims = tl.arange(0, BLOCK_D)
    key_halves = tl.arange(0, HALVES)
    value_halves = tl.arange(0, BLOCK_L)
    kw_ptr += batch * kw_batch + head * kw_head + first.to(tl.int64) * kw_entry
    ks_ptr += batch * km_batch + head * km_head + first.to(tl.int64) * km_entry
    km_ptr += batch * km_batch + head * km_head + first.to(tl.int64) * km_entry
    vw_ptr += batch * vw_batch + head * vw_head + first.to(tl.int64) * U * vw_entry
    vs_ptr += batch * vm_batch + head * vm_head + first.to(tl.int64) * U * vm_entry
    vm_ptr += batch * vm_batch + head * vm_head + first.to(tl.int64) * U * vm_entry
    q_ptr += batch * q_batch + (head * G + heads)[:, None].to(tl.int64) * q_head
    q = tl.load(q_ptr + dims[None, :], mask=(heads < G)[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    loud = tl.max(tl.abs(q), 1)
    loud = tl.where(loud > 0, loud, 1.0)
    q /= loud[:, None]
    loud *= scale
    if E > 0:
        entries = tl.arange(0, BLOCK_E)
        covered = tl.load(slots_ptr + row * E + entries, mask=entries < E, other=-1) - first * U
    tokens = tl.arange(0, U)
    rows = _tokens_at(tokens, KEY_F, HALVES)
    top = tl.full([8], float("-inf"), tl.float32)
    total = tl.zeros([8], tl.float32)
    least = tl.zeros([8], tl.float32)
    acc = tl.zeros([8, BLOCK_L * VALUE_F], tl.float32)
    for step in tl.range(steps, num_stages=STAGES):  # 32 bits do: the pointers start at this program's own groups
        if E > 0 and AHEAD:
            hidden = _among(rows, covered - step * U)
        words = tl.load(
            kw_ptr + step * kw_entry + dims[:, None] * HALVES + key_halves[None, :], mask=(dims < D)[:, None], other=0
        )
        key_scale = tl.load(ks_ptr + step * km_entry + dims, mask=dims < D, other=0.0).to(tl.float32)
        key_least = tl.load(km_ptr + step * km_entry + dims, mask=dims < D, other=0.0).to(tl.float32)
        logits = _logits(q, loud, words, key_scale, key_least, KEY_BITS, TOP, PAIRS)
        if CAPPED:
            logits = softcapped(logits, cap)
        if E > 0:
            here = covered - step * U
            if AHEAD:
                logits = tl.where(hidden[None, :], float("-inf"), logits)
            elif tl.max(((here >= 0) & (here < U)).to(tl.int32), 0) > 0:  # few groups have outliers
                logits = tl.where(_among(rows, here)[None, :], float("-inf"), logits)
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - shift[:, None])  # [8,U]
        faded = tl.exp2(top - shift)
        total = total * faded + tl.sum(weights, 1)
        value_least = _planes_first(tl.load(vm_ptr + (step * U + tokens) * vm_entry).to(tl.float32), KEY_F)
        least = least * faded + tl.sum(weights * value_least[None, :], 1)
        value_scale = _planes_first(tl.load(vs_ptr + (step * U + tokens) * vm_entry).to(tl.float32), KEY_F)
        value_words = tl.load(
            vw_ptr + (step * U + rows)[:, None] * vw_entry + value_halves[None, :],
            mask=(value_halves < VALUE_HALVES)[None, :],
            other=0,
        )
        acc = acc * faded[:, None] + _weighted(weights, value_words, value_scale, VALUE_BITS, TOP, PAIRS)
        top = new_top
    there = total > 0
    acc = (acc + least[:, None]) / tl.where(there, total, 1.0)[:, None]
    lse = (top + tl.log2(tl.where(there, total, 1.0))) * 0.6931471805599453  # -inf of nothing
    place = (row * G + heads) * parts + part
    tl.store(lse_ptr + place, lse, mask=heads < G)
    channel = tl.arange(0, BLOCK_L * VALUE_F)
    tl.store(
        out_ptr + place[:, None] * D_V + channel[None, :], acc, mask=(heads < G)[:, None] & (channel < D_V)[None, :]
    )


def serves(keys: Packed, values: Packed, group: int, dim: int, value_dim: int) -> bool:
    """Whether `_groups` reads these codes: groups that fill 16 half words or more, one scale per value."""
    halves = keys.unit * keys.bits // HALF
    return (
        group <= 8
        and not keys.per_token
        and values.per_token
        and values.unit == value_dim
        and halves >= 16
        and halves == next_power_of_two(halves)
        and keys.unit * keys.bits % 32 == 0
        and max(dim, value_dim) <= 256
    )


def groups_launch(
    queries: Tensor,
    query_positions: Tensor,
    keys: Packed,
    values: Packed,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    group_parts: int,
    coded: int,
    entries: int,
    even: bool,
    scale: float,
    cap: float,
    capped: bool,
) -> None:
    """The first `group_parts` of S parts [B,H_q,1,S,D_v], log-sum-exp [B,H_q,1,S]: whole groups of `coded` tokens."""
    batch, query_heads, _, parts, value_dim = out.shape
    heads, dim = keys.words.shape[1], queries.shape[-1]
    kw, vw = keys.words.view(torch.int16), values.words.view(torch.int16)
    _groups[batch * heads, group_parts](
        queries, query_positions, kw, keys.scale, keys.minimum, vw, values.scale, values.minimum, slots, lengths,
        out, log_sum_exp,
        *queries.stride()[:2], *kw.stride()[:3], *keys.scale.stride()[:3], *vw.stride()[:3], *values.scale.stride()[:3],
        coded, -(-(coded // keys.unit) // group_parts), heads, parts, scale, cap,
        G=query_heads // heads, D=dim, D_V=value_dim, E=entries, U=keys.unit, KEY_BITS=keys.bits,
        VALUE_BITS=values.bits, VALUE_HALVES=vw.shape[-1], EVEN=even, CAPPED=capped, TOP=LOUD,
        BLOCK_D=max(16, next_power_of_two(dim)), BLOCK_L=max(8, next_power_of_two(vw.shape[-1])),
        BLOCK_E=next_power_of_two(max(entries, 1)), PAIRS=not INTERPRETED, **launch(dim, keys.bits),
    )  # fmt: skip


def launch(dim: int, bits: int) -> dict[str, int]:
    """Launch options of `_groups`: no spills at 2 and 4 bits and D = 64, 128 and 256 (Triton 3.6, 3.9).

    Heads that are no power of two spill up to 32 bytes a thread at 2 bits. AHEAD: which tokens are outliers is found
    out for every group, before its codes are read, and not only where there are some: at D = 256 a branch amid the
    products spills 440 bytes a thread (sm_90).
    """
    return {"num_warps": 1 if dim <= 128 else 8, "STAGES": 2, "AHEAD": int(dim > 128)}

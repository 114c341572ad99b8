# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""D2O's merge of the token that a decoding step evicts into its nearest kept one.

Slots in pieces, then one program a head that also moves the threshold and mixes the two.
Shapes: B batch, H KV heads, T slots, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import at_head, jit, next_power_of_two, tl, view
from kvbench.kernels.nearest import NORM_FLOOR, check, cosines, margin, readable

PROGRAMS = 512  # pieces of all heads together where one token is matched
PIECE = 32  # slots of a piece, at least
SCAN = 512  # products looked through at once for the oldest of those that are as near


class OneMerge(NamedTuple):
    """similarity and nearest slot [B,H,1], the slot's new key and value [B,H,1,D], the threshold [B,H] after it."""

    similarity: Tensor
    nearest: Tensor
    key: Tensor
    value: Tensor
    threshold: Tensor


def merge_one_ref(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    victims: Tensor,
    threshold: Tensor | None,
    beta: float,
    average: bool,
    by_values: bool = False,
) -> OneMerge:
    """The definition (eq. 9-12). Arguments and result as in `merge_one_triton`."""
    index = victims[..., None]
    gone_key, gone_value = (x.gather(2, index.expand(*index.shape[:3], x.shape[3])).float() for x in (keys, values))
    judged, gone = (values, gone_value) if by_values else (keys, gone_key)
    table = cosines(gone, judged)[:, :, 0].masked_fill(positions < 0, -torch.inf).scatter(-1, victims, -torch.inf)
    similarity = table.amax(-1, keepdim=True)
    near = margin(table.dtype)
    nearest = positions.masked_fill(table < similarity - near, 2**31 - 1).argmin(-1, keepdim=True)
    mass = torch.ones_like(similarity) if average else similarity.exp()
    share = mass / (mass + (1.0 if average else torch.e))
    new = similarity[..., 0]
    if threshold is not None:
        share = share.where(~(similarity < threshold[..., None] - near), 0.0)
        new = (beta * new + (1 - beta) * threshold).where(~threshold.isnan(), new)
    mixed = [
        (1 - share)[..., None] * x.gather(2, nearest[..., None].expand(*index.shape[:3], x.shape[3])).float()
        + share[..., None] * part
        for x, part in ((keys, gone_key), (values, gone_value))
    ]
    return OneMerge(similarity, nearest, mixed[0].to(keys.dtype), mixed[1].to(values.dtype), new)


@jit
def _vector(
    x: tl.tensor, row: tl.tensor, H: tl.tensor, slot: tl.tensor, D: tl.tensor, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """What KV head `row` of x holds at a slot, in float32."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(at_head(x, row, H) + slot * x.row + dims, mask=dims < D, other=0.0).to(tl.float32)


@jit
def _products_piece(
    x: tl.tensor,
    positions: tl.tensor,
    victims_ptr: tl.tensor,
    products_ptr: tl.tensor,
    best_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    piece: tl.tensor,
    floor: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: the victim's product with each of a piece of one KV head's slots at length 1, and the largest."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, positions_ptr = at_head(x, row, H), at_head(positions, row, H)
    victim = tl.load(victims_ptr + row)
    dims = tl.arange(0, BLOCK_D)
    gone = _vector(x, row, H, victim, D, BLOCK_D)
    first = tl.program_id(1) * piece
    best = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for start in range(0, piece, BLOCK_T):
        slots = first + start + tl.arange(0, BLOCK_T)
        inside = (start + tl.arange(0, BLOCK_T) < piece) & (slots < T)
        there = inside & (slots != victim)
        there = there & (tl.load(positions_ptr + slots, mask=there, other=-1) >= 0)
        rows = x_ptr + slots.to(tl.int64)[:, None] * x.row + dims[None, :]
        vectors = tl.load(rows, mask=there[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
        product = tl.sum(vectors * gone[None, :], 1)
        product /= tl.maximum(tl.sqrt(tl.sum(vectors * vectors, 1)), floor)
        product = tl.where(there, product, float("-inf"))
        tl.store(products_ptr + row * T + slots, product, mask=inside)
        best = tl.maximum(best, product)
    tl.store(best_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(best, 0))


@jit
def _oldest(
    products_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    bests: tl.tensor,
    least: tl.tensor,
    piece: tl.tensor,
    T: tl.tensor,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The slot of the lowest position of those whose product is `least` at least; bests [PIECES]: of every piece."""
    lanes = tl.arange(0, PIECES)
    left = bests >= least
    age = tl.full([], 2147483647, tl.int32)
    slot = tl.full([], 0, tl.int32)
    for _ in range(tl.sum(left.to(tl.int32), 0)):
        at = tl.min(tl.where(left, lanes, PIECES), 0)
        left = left & (lanes != at)
        last = tl.minimum((at + 1) * piece, T)
        for start in range(at * piece, last, BLOCK_T):
            slots = start + tl.arange(0, BLOCK_T)
            product = tl.load(products_ptr + slots, mask=slots < last, other=float("-inf"))
            near = (slots < last) & (product >= least)
            ages = tl.load(positions_ptr + slots, mask=near, other=2147483647).to(tl.int32)
            lowest = tl.min(ages, 0)
            found = tl.min(tl.where(near & (ages == lowest), slots, 2147483647), 0)
            slot = tl.where(lowest < age, found, slot)
            age = tl.minimum(age, lowest)
    return slot.to(tl.int64)


@jit
def _mix(
    x: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    H: tl.tensor,
    victim: tl.tensor,
    slot: tl.tensor,
    share: tl.tensor,
    D: tl.tensor,
    BLOCK_D: tl.constexpr,
) -> None:
    """(1 - share) of the vector at `slot` and share of the victim's; the former as it is where share is 0."""
    own, gone = _vector(x, row, H, slot, D, BLOCK_D), _vector(x, row, H, victim, D, BLOCK_D)
    mixed = tl.where(share > 0, own + share * (gone - own), own)
    dims = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + row * D + dims, mixed.to(out_ptr.dtype.element_ty), mask=dims < D)


@jit
def _merge_one(
    keys: tl.tensor,
    values: tl.tensor,
    judged: tl.tensor,
    positions: tl.tensor,
    victims_ptr: tl.tensor,
    old_ptr: tl.tensor,
    products_ptr: tl.tensor,
    best_ptr: tl.tensor,
    similarity_ptr: tl.tensor,
    nearest_ptr: tl.tensor,
    new_keys_ptr: tl.tensor,
    new_values_ptr: tl.tensor,
    new_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    D_V: tl.tensor,
    D_J: tl.tensor,
    piece: tl.tensor,
    pieces: tl.tensor,
    beta: tl.tensor,
    floor: tl.tensor,
    near: tl.tensor,
    AVERAGE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """One program: one KV head's nearest slot of all pieces, its threshold moved, its key and value mixed."""
    row = tl.program_id(0).to(tl.int64)
    victim = tl.load(victims_ptr + row)
    gone = _vector(judged, row, H, victim, D_J, BLOCK_J)
    length = tl.maximum(tl.sqrt(tl.sum(gone * gone, 0)), floor)
    lanes = tl.arange(0, PIECES)
    bests = tl.load(best_ptr + row * pieces + lanes, mask=lanes < pieces, other=float("-inf"))
    best = tl.max(bests, 0)
    products, places = products_ptr + row * T, at_head(positions, row, H)
    slot = _oldest(products, places, bests, best - near * length, piece, T, PIECES, BLOCK_T)
    similarity = best / length
    share = 0.5
    if not AVERAGE:
        mass = tl.exp(similarity)
        share = mass / (mass + 2.718281828459045)
    new = similarity
    if old_ptr is not None:
        old = tl.load(old_ptr + row)
        share = tl.where(similarity < old - near, 0.0, share)  # against NaN, the threshold before the first, it is not
        new = tl.where(old == old, old + beta * (similarity - old), similarity)
    tl.store(similarity_ptr + row, similarity)
    tl.store(nearest_ptr + row, slot)
    tl.store(new_ptr + row, new)
    _mix(keys, new_keys_ptr, row, H, victim, slot, share, D, BLOCK_D)
    _mix(values, new_values_ptr, row, H, victim, slot, share, D_V, BLOCK_V)


def merge_one_triton(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    victims: Tensor,
    threshold: Tensor | None,
    beta: float,
    average: bool,
    by_values: bool = False,
) -> OneMerge:
    """One token of every KV head averaged into its nearest kept one, if their similarity reaches the threshold.

    keys [B,H,T,D], values [B,H,T,D_V], positions [B,H,T] (-1 = empty), victims [B,H,1]; at least one token stays.
    The nearest is that of largest cosine similarity (of keys, or by_values), the oldest of equal ones (`margin`). Key
    and value move by s = e^u / (e^u + e), or half with `average`, towards the victim's; not where u is below
    `threshold` [B,H] (NaN: there is none yet), which moves by beta towards u; threshold None: all are merged, and u is
    returned in its place. Two launches. CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError for float64 and
    without Triton.
    Source: Wan et al. 2024, arXiv 2406.13035, eq. 9-12.
    """
    check("merge_one", keys, values)
    batch, heads, slots, dim = keys.shape
    rows, wide = batch * heads, values.shape[3]
    wanted = keys.dtype, values.dtype
    keys, values = readable(keys), readable(values)
    positions = positions if positions.stride(-1) == 1 else positions.contiguous()
    victims = victims.contiguous()
    judged_dim = wide if by_values else dim
    block = next_power_of_two(judged_dim)
    tile = max(16, 4096 // block)
    piece = -(-slots // max(1, min(PROGRAMS // rows, -(-slots // max(PIECE, tile)))))
    pieces = -(-slots // piece)
    similarity, moved = torch.empty(2, batch, heads, dtype=torch.float32, device=keys.device).unbind(0)
    found = torch.empty(batch, heads, 1, dtype=torch.int64, device=keys.device)
    products, best = moved.new_empty(rows, slots), moved.new_empty(rows, pieces)
    key, value = keys.new_empty(batch, heads, 1, dim), values.new_empty(batch, heads, 1, wide)
    old = None if threshold is None else threshold.contiguous()
    judged, places = view(values if by_values else keys), view(positions)
    with torch.cuda.device_of(keys):
        _products_piece[rows, pieces](
            judged, places, victims, products, best, heads, slots, judged_dim, piece, NORM_FLOOR,
            BLOCK_T=tile, BLOCK_D=block, num_warps=4,
        )  # fmt: skip
        _merge_one[rows,](
            view(keys), view(values), judged, places, victims, old, products, best, similarity, found, key, value,
            moved, heads, slots, dim, wide, judged_dim, piece, pieces, beta, NORM_FLOOR, margin(best.dtype),
            AVERAGE=average, PIECES=next_power_of_two(pieces), BLOCK_T=SCAN, BLOCK_D=next_power_of_two(dim),
            BLOCK_V=next_power_of_two(wide), BLOCK_J=block, num_warps=2,
            maxnreg=128,  # left alone, ptxas takes 32 and spills
        )  # fmt: skip
    return OneMerge(similarity.unsqueeze(-1), found, key.to(wanted[0]), value.to(wanted[1]), moved)

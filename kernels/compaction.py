# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Compaction: what is kept of a layer moves together, in order, into tensors of its new size.

The kept slots are listed by a prefix sum over the mask (one launch), then one launch copies keys, values, positions and
up to four statistics of those slots, rows of a head side by side, 16 bytes a thread.
Shapes: B batch, H KV heads, T slots before, n slots after (some may be empty), W numbers of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.jit import jit, next_power_of_two, require_triton, tl

STATISTICS = 4  # tensors besides keys, values and positions that one launch copies


def kept_slots_ref(mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The definition: kept slots first, each kind in order. Arguments and result as in `kept_slots_triton`."""
    return (~mask).to(torch.int8).argsort(dim=-1, stable=True)[..., :most], mask.sum(-1, dtype=torch.int32)


def compact_ref(buffers: dict[str, Tensor], slots: Tensor, counts: Tensor, spare: int) -> dict[str, Tensor]:
    """The definition: every tensor at those slots, then empty ones. Arguments and result as in `compact_triton`."""
    kept = {}
    for name, x in buffers.items():
        index = slots.view(*slots.shape, *[1] * (x.dim() - 3)).expand(*slots.shape, *x.shape[3:])
        fill = -1 if name == "positions" else 0
        room = x.new_full((*slots.shape[:2], spare, *x.shape[3:]), fill)
        kept[name] = torch.cat([x.gather(2, index), room], dim=2)
    beyond = torch.arange(slots.shape[-1] + spare, device=slots.device) >= counts[..., None]
    kept["positions"].masked_fill_(beyond, -1)
    return kept


@jit
def _kept_slots(
    mask_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    mask_batch: tl.tensor,
    mask_head: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    most: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: the slots of one KV head under the mask in order, then the others, the first `most` of them."""
    row = tl.program_id(0).to(tl.int64)
    mask_ptr += row // H * mask_batch + row % H * mask_head
    slots_ptr += row * most
    lanes = tl.zeros([BLOCK], tl.int32)
    for start in range(0, T, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        lanes += (tl.load(mask_ptr + slots, mask=slots < T, other=0) != 0).to(tl.int32)
    count = tl.sum(lanes, 0)
    tl.store(counts_ptr + row, count)
    before = 0
    for start in range(0, T, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        stays = tl.load(mask_ptr + slots, mask=slots < T, other=0) != 0
        rank = before + tl.cumsum(stays.to(tl.int32), 0) - 1  # of the last kept slot so far
        before += tl.sum(stays.to(tl.int32), 0)
        place = tl.where(stays, rank, count + slots - rank - 1)
        tl.store(slots_ptr + place, slots.to(tl.int64), mask=(slots < T) & (place < most))


@jit
def _copy(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_slot: tl.tensor,
    slots: tl.tensor,
    places: tl.tensor,
    old: tl.tensor,
    C: tl.tensor,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Rows of W numbers: x at `slots` to `places` of row `row` of out [B*H,C,W]; 0 beyond the `old` ones."""
    x_ptr += batch * x_batch + head * x_head
    out_ptr += row * C * W
    numbers = tl.arange(0, BLOCK_W)
    inside = (places < C)[:, None] & (numbers < W)[None, :]
    x = tl.load(x_ptr + slots[:, None] * x_slot + numbers[None, :], mask=inside & (places < old)[:, None], other=0)
    tl.store(out_ptr + places.to(tl.int64)[:, None] * W + numbers[None, :], x, mask=inside)


@jit
def _compact(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    new_keys_ptr: tl.tensor,
    new_values_ptr: tl.tensor,
    new_positions_ptr: tl.tensor,
    new_a_ptr: tl.tensor,
    new_b_ptr: tl.tensor,
    new_c_ptr: tl.tensor,
    new_d_ptr: tl.tensor,
    keys_batch: tl.tensor,
    keys_head: tl.tensor,
    keys_slot: tl.tensor,
    values_batch: tl.tensor,
    values_head: tl.tensor,
    values_slot: tl.tensor,
    positions_batch: tl.tensor,
    positions_head: tl.tensor,
    positions_slot: tl.tensor,
    a_batch: tl.tensor,
    a_head: tl.tensor,
    a_slot: tl.tensor,
    b_batch: tl.tensor,
    b_head: tl.tensor,
    b_slot: tl.tensor,
    c_batch: tl.tensor,
    c_head: tl.tensor,
    c_slot: tl.tensor,
    d_batch: tl.tensor,
    d_head: tl.tensor,
    d_slot: tl.tensor,
    H: tl.tensor,
    most: tl.tensor,
    C: tl.tensor,
    D: tl.constexpr,
    D_V: tl.constexpr,
    W: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: BLOCK slots of one KV head, everything they hold; NUMBER statistics of W numbers a slot."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + row * most + places, mask=places < most, other=0)
    count = tl.load(counts_ptr + row)
    positions_ptr += batch * positions_batch + head * positions_head
    positions = tl.load(positions_ptr + slots * positions_slot, mask=places < count, other=-1)
    tl.store(new_positions_ptr + row * C + places, positions, mask=places < C)
    _copy(
        keys_ptr, new_keys_ptr, batch, head, row, keys_batch, keys_head, keys_slot, slots, places, most, C, D, BLOCK_D
    )
    _copy(
        values_ptr, new_values_ptr, batch, head, row, values_batch, values_head, values_slot, slots, places, most, C,
        D_V, BLOCK_V,
    )  # fmt: skip
    if NUMBER > 0:
        _copy(a_ptr, new_a_ptr, batch, head, row, a_batch, a_head, a_slot, slots, places, most, C, W, BLOCK_W)
    if NUMBER > 1:
        _copy(b_ptr, new_b_ptr, batch, head, row, b_batch, b_head, b_slot, slots, places, most, C, W, BLOCK_W)
    if NUMBER > 2:
        _copy(c_ptr, new_c_ptr, batch, head, row, c_batch, c_head, c_slot, slots, places, most, C, W, BLOCK_W)
    if NUMBER > 3:
        _copy(d_ptr, new_d_ptr, batch, head, row, d_batch, d_head, d_slot, slots, places, most, C, W, BLOCK_W)


def kept_slots_triton(mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The slots of mask [B,H,T] in order, then the others: the first `most`, [B,H,most]; and how many it holds, [B,H].

    One launch. CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError where Triton is missing.
    """
    require_triton("kept_slots", mask.device)
    batch, heads, length = mask.shape
    assert 0 <= most <= length, "no head keeps more slots than there are"
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    slots = torch.empty(batch, heads, most, dtype=torch.int64, device=mask.device)
    counts = torch.zeros(batch, heads, dtype=torch.int32, device=mask.device)
    block = min(4096, max(128, next_power_of_two(length)))
    if mask.numel():
        with torch.cuda.device_of(mask):
            sizes = *mask.stride()[:2], heads, length, most
            _kept_slots[batch * heads,](mask, slots, counts, *sizes, BLOCK=block, num_warps=max(1, block // 512))
    return slots, counts


def tiles(dim: int, bytes_each: int) -> dict[str, int]:
    """Slots of a program and warps, for heads of `dim` numbers: about 8 KiB of keys, so that small budgets fill a GPU.

    Hopper: 1,024 slots of 8 heads are 256 programs at D = 128 in bf16; each thread has 4 loads of 16 bytes in flight.
    """
    row = next_power_of_two(dim) * bytes_each
    return {"BLOCK": max(16, min(128, 8192 // row)), "num_warps": 4}


def compact_triton(buffers: dict[str, Tensor], slots: Tensor, counts: Tensor, spare: int) -> dict[str, Tensor]:
    """Every tensor [B,H,T,...] at slots [B,H,n], with `spare` empty slots behind: [B,H,n+spare,...], one launch.

    buffers: `keys`, `values`, `positions`, and statistics of equal shape and dtype. Positions are -1 beyond a head's
    own counts [B,H], where the rest of a slot means nothing; spare slots are 0. Any strides whose last is 1.
    CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError where Triton is missing.
    """
    require_triton("compact", slots.device)
    batch, heads, most = slots.shape
    slots, counts = slots.contiguous(), counts.contiguous()
    sources = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in buffers.items()}
    kept = {name: x.new_empty(batch, heads, most + spare, *x.shape[3:]) for name, x in sources.items()}
    if not kept["positions"].numel():
        return kept
    names = [name for name in buffers if name not in ("keys", "values", "positions")]
    keys, values = sources["keys"], sources["values"]
    width = sources[names[0]].shape[3] if names else 1
    for first in range(0, max(1, len(names)), STATISTICS):
        some = names[first : first + STATISTICS]
        tensors = ["keys", "values", "positions", *some, *["positions"] * (STATISTICS - len(some))]
        ours, theirs = [sources[name] for name in tensors], [kept[name] for name in tensors]
        strides = [stride for x in ours for stride in x.stride()[:3]]
        how = tiles(max(keys.shape[3], values.shape[3]), keys.element_size())
        blocks = -(-(most + spare) // how["BLOCK"])
        with torch.cuda.device_of(slots):
            _compact[batch * heads, blocks](
                slots, counts, *ours, *theirs, *strides, heads, most, most + spare,
                D=keys.shape[3], D_V=values.shape[3], W=width, NUMBER=len(some),
                BLOCK_D=next_power_of_two(keys.shape[3]), BLOCK_V=next_power_of_two(values.shape[3]),
                BLOCK_W=next_power_of_two(width), **how,
            )  # fmt: skip
    return kept

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Compaction: what is kept of a layer moves together, in order, into tensors of its new size.

The kept slots are listed by a prefix sum over the mask (one launch), then one launch copies keys, values, positions and
statistics of those slots, rows of a head side by side, 16 bytes a thread.
Shapes: B batch, H KV heads, T slots before, n slots after (some may be empty), W numbers of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.jit import at_head, jit, next_power_of_two, require_triton, rows, tl


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
    mask: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    most: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: the slots of one KV head under the mask in order, then the others, the first `most` of them."""
    row = tl.program_id(0).to(tl.int64)
    mask_ptr = at_head(mask, row, H)
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
def _compact(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    positions: tl.tuple,
    columns: tl.tuple,
    H: tl.tensor,
    most: tl.tensor,
    C: tl.tensor,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK slots of one KV head, positions and all columns, of WIDTHS numbers, BLOCKS filled up.

    A column is a `View` of the slots before, and a contiguous tensor of those after.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + row * most + places, mask=places < most, other=0)
    count = tl.load(counts_ptr + row)
    old, new = positions
    kept = tl.load(at_head(old, row, H) + slots * old.row, mask=places < count, other=-1)
    tl.store(new + row * C + places, kept, mask=places < C)
    for i in tl.static_range(len(BLOCKS)):
        old, new = columns[i]
        numbers = tl.arange(0, BLOCKS[i])[None, :]
        inside = (places < C)[:, None] & (numbers < WIDTHS[i])
        at = at_head(old, row, H) + slots[:, None] * old.row
        found = tl.load(at + numbers, mask=inside & (places < most)[:, None], other=0)  # spare slots are 0
        tl.store(new + (row * C + places)[:, None] * WIDTHS[i] + numbers, found, mask=inside)


def kept_slots_triton(mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The slots of mask [B,H,T] in order, then the others: the first `most`, [B,H,most]; and how many it holds, [B,H].

    One launch. CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError where Triton is missing.
    """
    require_triton("kept_slots", mask.device)
    batch, heads, length = mask.shape
    assert 0 <= most <= length, "no head keeps more slots than there are"
    slots = torch.empty(batch, heads, most, dtype=torch.int64, device=mask.device)
    counts = torch.zeros(batch, heads, dtype=torch.int32, device=mask.device)
    block = min(4096, max(128, next_power_of_two(length)))
    if mask.numel():
        with torch.cuda.device_of(mask):
            how = {"BLOCK": block, "num_warps": max(1, block // 512)}
            _kept_slots[batch * heads,](rows(mask), slots, counts, heads, length, most, **how)
    return slots, counts


def tiles(dim: int, bytes_each: int) -> dict[str, int]:
    """Slots of a program and warps, for heads of `dim` numbers: about 8 KiB of keys, so that small budgets fill a GPU.

    Hopper: 1,024 slots of 8 heads are 256 programs at D = 128 in bf16; each thread has 4 loads of 16 bytes in flight.
    """
    row = next_power_of_two(dim) * bytes_each
    return {"BLOCK": max(16, min(128, 8192 // row)), "num_warps": 4, "maxnreg": 128}


def compact_triton(buffers: dict[str, Tensor], slots: Tensor, counts: Tensor, spare: int) -> dict[str, Tensor]:
    """Every tensor [B,H,T,...] at slots [B,H,n], with `spare` empty slots behind: [B,H,n+spare,...], one launch.

    buffers: `keys`, `values`, `positions`, and statistics. Positions are -1 beyond a head's own counts [B,H], where the
    rest of a slot means nothing; spare slots are 0. Any strides whose last is 1.
    CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError where Triton is missing.
    """
    require_triton("compact", slots.device)
    batch, heads, most = slots.shape
    slots, counts = slots.contiguous(), counts.contiguous()
    kept = {name: x.new_empty(batch, heads, most + spare, *x.shape[3:]) for name, x in buffers.items()}
    if not kept["positions"].numel():
        return kept
    columns = {name: (rows(x), kept[name]) for name, x in buffers.items()}
    positions = columns.pop("positions")
    widths = tuple(buffers[name].shape[3:].numel() for name in columns)
    how = tiles(max(widths), buffers["keys"].element_size())
    with torch.cuda.device_of(slots):
        _compact[batch * heads, -(-(most + spare) // how["BLOCK"])](
            slots, counts, positions, tuple(columns.values()), heads, most, most + spare, WIDTHS=widths,
            BLOCKS=tuple(map(next_power_of_two, widths)), **how,
        )  # fmt: skip
    return kept

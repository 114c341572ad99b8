# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""The nearest kept token of every evicted one of a prompt, by cosine similarity.

Tiles of products on matrix units with a running maximum; the table [E,C] never exists.
Shapes: B batch, H KV heads, E evicted and C kept tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.jit import View, at_head, fit_heads, jit, next_power_of_two, of_head, require_triton, tl, view

NORM_FLOOR = 1e-6


def margin(dtype: torch.dtype) -> float:
    """Cosines computed in `dtype` that differ by no more than this are equally large: rounding cannot tell them apart.

    Equal tokens have equal values in the first layer, but a product of another shape (more rows in the batch, another
    place in the cache) may round its last bits otherwise, and those must not decide which of the two is the nearest.
    """
    return 64 * torch.finfo(dtype).eps


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """[...,A,D] x [...,B,D] -> [...,A,B]."""
    a, b = (x.float() / x.float().norm(dim=-1, keepdim=True).clamp(min=NORM_FLOOR) for x in (a, b))
    return a @ b.mT


def nearest_ref(gone: Tensor, own: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, with the whole table. Arguments and result as in `nearest_triton`."""
    table = cosines(gone, own).masked_fill(~present[:, :, None], -torch.inf)
    best = table.amax(-1)
    return best, (table >= best[..., None] - margin(table.dtype)).to(torch.int8).argmax(-1)


@jit
def _products(
    gone: tl.tensor, own: View, present: View, places: tl.tensor, C: tl.tensor, D: tl.tensor, floor: tl.tensor
) -> tl.tensor:
    """Products of `gone` [E,BLOCK_D] with a head's vectors at `places` [C] at length 1, -inf where there is none."""
    there = tl.load(present.ptr + places, mask=places < C, other=0) != 0
    dims = tl.arange(0, gone.shape[1])
    rows = own.ptr + places.to(tl.int64)[:, None] * own.row + dims[None, :]
    vectors = tl.load(rows, mask=there[:, None] & (dims < D)[None, :], other=0.0)
    length = tl.sqrt(tl.sum(vectors.to(tl.float32) * vectors.to(tl.float32), 1))
    products = tl.dot(gone, tl.trans(vectors), input_precision="ieee")
    return tl.where(there[None, :], products / tl.maximum(length, floor)[None, :], float("-inf"))


@jit
def _nearest(
    gone: View,
    own: View,
    present: View,
    best_ptr: tl.tensor,
    place_ptr: tl.tensor,
    H: tl.tensor,
    E: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    floor: tl.tensor,
    near: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: the nearest kept token of BLOCK_E evicted ones of one KV head, the first of equally near ones."""
    blocks = tl.cdiv(E, BLOCK_E)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    own, present = of_head(own, row, H, 0), of_head(present, row, H, 0)
    entries = tl.program_id(0) % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    dims = tl.arange(0, BLOCK_D)
    inside = (entries < E)[:, None] & (dims < D)[None, :]
    rows = at_head(gone, row, H) + entries.to(tl.int64)[:, None] * gone.row + dims[None, :]
    vectors = tl.load(rows, mask=inside, other=0.0)
    best = tl.full([BLOCK_E], float("-inf"), tl.float32)
    for start in range(0, C, BLOCK_C):
        places = start + tl.arange(0, BLOCK_C)
        products = _products(vectors, own, present, places, C, D, floor)
        best = tl.maximum(best, tl.max(products, 1))
    length = tl.maximum(tl.sqrt(tl.sum(vectors.to(tl.float32) * vectors.to(tl.float32), 1)), floor)
    least = best - near * length
    place = tl.full([BLOCK_E], 2147483647, tl.int32)
    for start in range(0, C, BLOCK_C):
        places = start + tl.arange(0, BLOCK_C)
        products = _products(vectors, own, present, places, C, D, floor)
        first = tl.min(tl.where(products >= least[:, None], places[None, :], 2147483647), 1)
        place = tl.minimum(place, first)
    tl.store(best_ptr + row * E + entries, best / length, mask=entries < E)
    tl.store(place_ptr + row * E + entries, place.to(tl.int64), mask=entries < E)


def tiles(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and launch options of `_nearest`, vectors of `dim` numbers: no spills, 99 KiB of shared memory.

    16-bit numbers go through matrix units; products of float32 stay in float32, tile by small tile.
    """
    block = max(16, next_power_of_two(dim))
    if dtype == torch.float32:
        return {"BLOCK_E": 32, "BLOCK_C": 16, "BLOCK_D": block, "num_warps": 8, "num_stages": 2}
    each = {"BLOCK_C": 64, "BLOCK_D": block, "num_stages": 2}
    if block <= 64:  # where 128 vectors at a time spill 8 bytes a thread on sm_80 (Triton 3.6)
        return {**each, "BLOCK_E": 64, "num_warps": 4}
    return {**each, "BLOCK_E": 128 if block == 128 else 64, "num_warps": 8}


def readable(x: Tensor) -> Tensor:
    """Numbers of a row side by side; float32 instead of bfloat16 for the interpreter, which reads its bit patterns."""
    x = x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x
    return x if x.stride(-1) == 1 else x.contiguous()


def check(kernel: str, *tensors: Tensor) -> None:
    require_triton(kernel, tensors[0].device)
    fit_heads(kernel, *(x.shape[-1] for x in tensors))
    if any(x.dtype == torch.float64 for x in tensors):
        raise ValueError(f"{kernel}_triton computes in float32 and takes no float64 tensors")


def nearest_triton(gone: Tensor, own: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Largest cosine similarity of gone [B,H,E,D] with own [B,H,C,D] where present [B,H,C], and place: [B,H,E].

    Ties (`margin`) go to the first place; -inf and place 0 where a head has none. One launch. Both of one dtype:
    products of 16-bit numbers are exact and summed in float32. CUDA tensors; CPU tensors under TRITON_INTERPRET=1.
    ValueError for float64 and where Triton is missing.
    """
    check("nearest", gone, own)
    assert gone.dtype == own.dtype, "evicted and kept vectors come from one store"
    batch, heads, evicted, dim = gone.shape
    best = torch.empty(batch, heads, evicted, dtype=torch.float32, device=gone.device)
    place = torch.empty(batch, heads, evicted, dtype=torch.int64, device=gone.device)
    if not best.numel():
        return best, place
    gone, own, present = readable(gone), readable(own), present.contiguous()
    how = tiles(dim, gone.dtype)
    with torch.cuda.device_of(gone):
        _nearest[-(-evicted // how["BLOCK_E"]) * batch * heads,](
            view(gone), view(own), view(present), best, place, heads, evicted, own.shape[2], dim, NORM_FLOOR,
            margin(best.dtype), **how,
        )  # fmt: skip
    return best, place

# ruff: noqa: N803, N806 - in kernels, sizes have the names they have in shapes
"""What the kernels over whole prompts have in common: tiles of logits, who sees whom, and how a call becomes arguments.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim. Logits are in base 2,
softmax(x) = exp2(x log2(e) - lse log2(e)): GPUs have exp2 in hardware.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import fit_heads, jit, next_power_of_two, require_triton, tl
from kvbench.kernels.softmax_blocks import LOG2E


@jit
def span(
    positions_ptr: tl.tensor, length: tl.tensor, low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where the positions low..high lie, in any order: the first such entry, and how many blocks reach the last one."""
    first = tl.full([1024], 2**30, tl.int32)
    last = tl.zeros([1024], tl.int32)
    for start in range(0, length, 1024):
        entries = start + tl.arange(0, 1024)
        positions = tl.load(positions_ptr + entries, mask=entries < length, other=-1).to(tl.int32)
        inside = (positions >= 0) & (positions >= low) & (positions <= high)
        first = tl.minimum(first, tl.where(inside, entries, 2**30))
        last = tl.maximum(last, tl.where(inside, entries + 1, 0))
    begin = tl.min(first, 0)
    return begin, tl.cdiv(tl.max(last, 0) - begin, BLOCK)


@jit
def query_blocks(
    q_pos_ptr: tl.tensor,
    k_place: tl.tensor,
    start: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    window: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The queries that see one of the slots start..start+BLOCK_T: the first one, how many blocks, how many need a mask.

    The blocks that need one come first.
    """
    if ALIGNED:
        before = T - M  # slots that are older than the first query
        begin = tl.maximum(0, start - before)
        end = M
        if window is not None:
            end = tl.maximum(begin, tl.minimum(M, start + BLOCK_T - 1 + window - before))
        blocks = tl.cdiv(end - begin, BLOCK_M)
        masked = blocks
        if window is None:
            masked = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start + BLOCK_T - 1 - before - begin), BLOCK_M))
    else:
        high = 2**30
        if window is not None:
            high = tl.max(tl.where(k_place == 2**30, -1, k_place), 0) + window - 1
        begin, blocks = span(q_pos_ptr, M, tl.min(k_place, 0), high, BLOCK_M)
        masked = blocks
    return begin, blocks, masked


@jit
def query_places(ptr: tl.tensor, queries: tl.tensor, M: tl.tensor, T: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Where queries stand in time: their positions, or, where they are the newest of the slots, those slots."""
    if ALIGNED:  # noqa: SIM108 - a constant of the compilation: only one side exists
        places = queries + (T - M)
    else:
        places = tl.load(ptr + queries, mask=queries < M, other=-1).to(tl.int32)
    return places


@jit
def slot_places(ptr: tl.tensor, slots: tl.tensor, T: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """The same of slots; empty ones and those beyond T lie later than every query."""
    if ALIGNED:
        places = tl.where(slots < T, slots, 2**30)
    else:
        places = tl.load(ptr + slots, mask=slots < T, other=-1).to(tl.int32)
        places = tl.where(places < 0, 2**30, places)
    return places


@jit
def slot_blocks(
    k_pos_ptr: tl.tensor,
    q_place: tl.tensor,
    start: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    window: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The slots that queries start..start+BLOCK_M see: the first one, how many blocks, how many need no mask.

    The blocks that need none come first.
    """
    free = 0
    if ALIGNED:
        begin, before = 0, T - M
        if window is not None:
            begin = tl.maximum(0, start + before - window + 1)
        else:
            free = (start + before + 1) // BLOCK_T
        blocks = tl.cdiv(tl.minimum(T, start + BLOCK_M + before) - begin, BLOCK_T)
    else:
        low = 0
        if window is not None:
            low = tl.min(tl.where(q_place < 0, 2**30, q_place), 0) - window + 1
        begin, blocks = span(k_pos_ptr, T, low, tl.max(q_place, 0), BLOCK_T)
    return begin, blocks, free


class Rule(NamedTuple):
    """What makes logits in base 2 of inner products, and who sees whom: a factor, a soft cap, a sliding window."""

    scale: float
    cap: float | None
    window: int | None


def rule_of(scaling: float, softcap: float | None, sliding_window: int | None = None) -> Rule:
    """A model's scaling, soft cap and sliding window as the kernels' base 2 wants them."""
    if softcap is None:
        return Rule(LOG2E * scaling, None, sliding_window)
    return Rule(2 * LOG2E * scaling / softcap, LOG2E * softcap, sliding_window)


class Vectors(NamedTuple):
    """Vectors [n] to be loaded: pointers to their first numbers, which are there, and how far numbers lie apart."""

    rows: tl.tensor
    there: tl.tensor
    dim: tl.tensor


@jit
def tile(x: Vectors, start: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Numbers start..start+BLOCK_D of D of vectors x: [n,BLOCK_D], 0 where there is nothing."""
    dims = start + tl.arange(0, BLOCK_D)
    mask = x.there[:, None]
    if start + BLOCK_D > D:
        mask = mask & (dims < D)[None, :]
    return tl.load(x.rows[:, None] + dims.to(tl.int64)[None, :] * x.dim, mask=mask, other=0.0)


@jit
def logits_of(held: tl.tensor, a: Vectors, b: Vectors, rule: Rule, DIMS: tl.constexpr) -> tl.tensor:
    """Logits of vectors a and b, [a,b]. held: the first numbers of a, DIMS.BLOCK of them."""
    products = tl.dot(held, tl.trans(tile(b, 0, DIMS.D, DIMS.BLOCK)), input_precision="ieee")
    WHOLE: tl.constexpr = DIMS.WHOLE  # Triton 3.6 takes no field here
    BLOCK: tl.constexpr = DIMS.BLOCK
    for start in tl.static_range(BLOCK, WHOLE, BLOCK):
        part = tl.trans(tile(b, start, DIMS.D, BLOCK))
        products = tl.dot(tile(a, start, DIMS.D, BLOCK), part, products, input_precision="ieee")
    return capped(products * rule.scale, rule.cap)


@jit
def capped(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(logit / cap), scaled as `rule_of` says: tanh(y) = 1 - 2 / (exp(2y) + 1), 2y in base 2."""
    if cap is not None:
        logits = cap * (1 - 2 / (tl.exp2(logits) + 1))
    return logits


@jit
def hidden(logits: tl.tensor, q_place: tl.tensor, k_place: tl.tensor, window: tl.tensor) -> tl.tensor:
    """The logits, -inf where a query may not read a slot; places broadcast against them."""
    seen = k_place <= q_place
    if window is not None:
        seen = seen & (k_place > q_place - window)
    return tl.where(seen, logits, float("-inf"))


@jit
def weighed(logits: tl.tensor, top: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of the next logits [R,T] of a softmax in base 2; its maximum and sum [R]; what older sums fade to."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights, fading = tl.exp2(logits - shift[:, None]), tl.exp2(top - shift)
    return weights, new_top, total * fading + tl.sum(weights, 1), fading


@jit
def attend(
    logits: tl.tensor, values: tl.tensor, top: tl.tensor, total: tl.tensor, out: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output of a softmax in base 2 after its next logits [R,T] and values [T,D]."""
    weights, top, total, fading = weighed(logits, top, total)
    return top, total, out * fading[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")


@jit
def log_sum(top: tl.tensor, total: tl.tensor, nothing: tl.constexpr) -> tl.tensor:
    """Base-2 log-sum-exp of rows by their maximum and sum; `nothing` where they saw nothing."""
    some = total > 0
    return tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), nothing)


def same_dtype(kernel: str, queries: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype they are multiplied in. ValueError for float64 and where Triton is missing."""
    require_triton(kernel, queries.device)
    fit_heads(kernel, *(x.shape[-1] for x in (queries, *others)))
    dtype = queries.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    if dtype == torch.float64:
        raise ValueError(f"{kernel} computes in float32 and takes no float64 tensors: use the PyTorch path")
    if not queries.is_cuda and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter multiplies the bit patterns of bfloat16; these are its values
    return tuple(x.to(dtype) for x in (queries, *others))


class Dims(NamedTuple):
    """Numbers of a head, filled up to a power of two, and how many of them are multiplied at a time."""

    D: int
    WHOLE: int
    BLOCK: int


def dims_of(dim: int, dtype: torch.dtype) -> Dims:
    """A head's size in a tile, and how much of it is multiplied at a time.

    16-bit tiles go to the tensor cores whole. float32 in full precision is summed by ordinary cores, 32 dimensions at
    a time: whole heads would spill (seen: 8 KiB a thread at D = 256, sm_90).
    """
    whole = max(16, next_power_of_two(dim))
    if dtype == torch.float32:
        return Dims(dim, max(32, whole), 32)
    return Dims(dim, whole, whole)


LITTLE = 99 * 1024  # bytes of shared memory that a block may ask for on any GPU since 2020


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for on this device."""
    if device.type != "cuda":
        return LITTLE
    known = torch.cuda.get_device_properties(device)  # kept by PyTorch: no question to the device
    return int(getattr(known, "shared_memory_per_block_optin", LITTLE))


def sum_tiles(dim: int, dtype: torch.dtype, shared: int = LITTLE) -> dict[str, Any]:
    """Tile sizes and launch options of sums over queries: no register spills, no more shared memory than there is.

    Three stages: with two, Triton asks for the next tile only once this one is multiplied. At 64 to 128 dimensions two
    blocks fit a multiprocessor, so that one takes exponentials while the other multiplies.
    """
    dims = dims_of(dim, dtype)
    if dtype == torch.float32:
        block = 16 if dim > 128 else 32
        return {"DIMS": dims, "BLOCK_M": 32, "BLOCK_T": block, "num_warps": 4, "num_stages": 2}
    if dims.WHOLE > 128:
        stages = 3 if shared >= 136 * 1024 else 2
        return {"DIMS": dims, "BLOCK_M": 64, "BLOCK_T": 64, "num_warps": 4, "num_stages": stages}
    return {"DIMS": dims, "BLOCK_M": 64, "BLOCK_T": 128, "num_warps": 4, "num_stages": 3}

# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""Shared code of the Triton kernels: the import of Triton, views of tensors, tiles of logits, masks, running softmaxes.

Triton has wheels for Linux only. Only this module imports it, so that the others can be imported everywhere.
 Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim. Logits are
in base 2, softmax(x) = exp2(x log2(e) - lse log2(e)), because GPUs have exp2 in hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.devices import multipliable
from kvbench.kernels.references import LOG2E

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["tl", "triton"]  # re-exported

LARGEST_HEAD = 256


class View(NamedTuple):
    """A tensor [B,H,T,D] as an argument of a kernel, and its strides; 0 for missing dimensions."""

    ptr: Tensor
    batch: int
    head: int
    row: int = 0
    dim: int = 0


def view(x: Tensor) -> View:
    """x as a `View`; its first dimensions are B, H, T and D."""
    return View(x, *x.stride())


def rows(x: Tensor) -> View:
    """x, or a copy with a contiguous last dimension."""
    return view(x if x.stride(-1) == 1 else x.contiguous())


def jit(function: Callable[..., Any], varying: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """`triton.jit`, or the function itself without Triton; every launch calls `require_triton` first.

    varying: arguments that change from step to step; values divisible by 16 do not compile another kernel.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def require_triton(kernel: str, device: object) -> None:
    """Raise ValueError if Triton is missing."""
    if triton is None:
        raise ValueError(f"{kernel} on device {device} needs Triton, which is not installed here; use device=cpu")


def fit_heads(kernel: str, *dims: int) -> None:
    """Raise ValueError for heads with more numbers than a program's tiles can have."""
    if max(dims) > LARGEST_HEAD:
        raise ValueError(f"{kernel} takes a head_dim of at most {LARGEST_HEAD}, got {max(dims)}; use device=cpu")


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, for n >= 1: the possible sizes of tiles."""
    return 1 << (n - 1).bit_length()


@jit
def at_head(x: tl.tensor, row: tl.tensor, heads: tl.tensor) -> tl.tensor:
    """The offset of KV head `row` of B * heads in a `View`."""
    return x.ptr + row // heads * x.batch + row % heads * x.head


@jit
def of_head(x: View, row: tl.tensor, heads: tl.tensor, first: tl.tensor) -> View:
    """The part of x of KV head `row`, from slot `first` on."""
    return View(at_head(x, row, heads) + first * x.row, 0, 0, x.row, x.dim)


@jit
def span(
    positions_ptr: tl.tensor, length: tl.tensor, low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first entry with a position in low..high (in any order), and the number of blocks up to the last one."""
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
    q_pos_ptr: tl.tensor, k_place: tl.tensor, start: tl.tensor, M: tl.tensor, T: tl.tensor, window: tl.tensor,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The queries that see one of the slots start..start+BLOCK_T: first query, number of blocks, blocks with a mask.

    The blocks with a mask come first.
    """
    if ALIGNED:
        before = T - M  # slots older than the first query
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
    """The places of queries: their positions, or their slots if they are the newest slots."""
    if ALIGNED:  # noqa: SIM108 - a constant of the compilation: only one side exists
        places = queries + (T - M)
    else:
        places = tl.load(ptr + queries, mask=queries < M, other=-1).to(tl.int32)
    return places


@jit
def slot_places(ptr: tl.tensor, slots: tl.tensor, T: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """The places of slots; empty slots and slots beyond T get a place after every query."""
    if ALIGNED:
        places = tl.where(slots < T, slots, 2**30)
    else:
        places = tl.load(ptr + slots, mask=slots < T, other=-1).to(tl.int32)
        places = tl.where(places < 0, 2**30, places)
    return places


@jit
def segment(starts: tl.tensor, counts: tl.tensor, kv_row: tl.tensor, T: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First flat slot and length of a KV head's segment; 0 and T if there are no segments."""
    start, length = tl.zeros([], tl.int64), T
    if counts is not None:
        start = tl.load(starts + kv_row).to(tl.int64)
        length = tl.load(counts + kv_row).to(tl.int32)
    return start, length


class Rule(NamedTuple):
    """The conversion of inner products to logits in base 2, and the mask: a factor, a soft cap, a sliding window."""

    scale: float
    cap: float | None
    window: int | None


def rule_of(scaling: float, softcap: float | None, sliding_window: int | None = None) -> Rule:
    """A model's scaling, soft cap and sliding window, converted to base 2."""
    if softcap is None:
        return Rule(LOG2E * scaling, None, sliding_window)
    return Rule(2 * LOG2E * scaling / softcap, LOG2E * softcap, sliding_window)


class Pointers(NamedTuple):
    """Vectors [n] to load: pointers to their first numbers, whether they exist, and the stride of their numbers."""

    rows: tl.tensor
    there: tl.tensor
    dim: tl.tensor


@jit
def tile(x: Pointers, start: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Numbers start..start+BLOCK_D of D of vectors x: [n,BLOCK_D], 0 outside of x."""
    dims = start + tl.arange(0, BLOCK_D)
    mask = x.there[:, None]
    if start + BLOCK_D > D:
        mask = mask & (dims < D)[None, :]
    return tl.load(x.rows[:, None] + dims.to(tl.int64)[None, :] * x.dim, mask=mask, other=0.0)


@jit
def logits_of(held: tl.tensor, a: Pointers, b: Pointers, rule: Rule, DIMS: tl.constexpr) -> tl.tensor:
    """Logits of vectors a and b, [a,b]. held: the first DIMS.BLOCK numbers of a, already loaded."""
    products = tl.dot(held, tl.trans(tile(b, 0, DIMS.D, DIMS.BLOCK)), input_precision="ieee")
    WHOLE: tl.constexpr = DIMS.WHOLE  # Triton 3.6 does not accept a field here
    BLOCK: tl.constexpr = DIMS.BLOCK
    for start in tl.static_range(BLOCK, WHOLE, BLOCK):
        part = tl.trans(tile(b, start, DIMS.D, BLOCK))
        products = tl.dot(tile(a, start, DIMS.D, BLOCK), part, products, input_precision="ieee")
    return capped(products * rule.scale, rule.cap)


@jit
def capped(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(logit / cap), with the scaling of `rule_of`: tanh(y) = 1 - 2 / (exp(2y) + 1), 2y in base 2."""
    if cap is not None:
        logits = cap * (1 - 2 / (tl.exp2(logits) + 1))
    return logits


@jit
def hidden(logits: tl.tensor, q_place: tl.tensor, k_place: tl.tensor, window: tl.tensor) -> tl.tensor:
    """The logits, -inf for slots that a query may not read; places are broadcastable."""
    seen = k_place <= q_place
    if window is not None:
        seen = seen & (k_place > q_place - window)
    return tl.where(seen, logits, float("-inf"))


@jit
def in_sight(place: tl.tensor, oldest: tl.tensor, newest: tl.tensor, window: tl.tensor) -> tl.tensor:
    """Whether a query from `oldest` to `newest` may read slots at these positions; -1 is an empty slot."""
    seen = (place >= 0) & (place <= newest)
    if window is not None:
        seen = seen & (place > oldest - window)
    return seen


@jit
def product_of(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a b of a [R,D] and b [D,N]. float32, without tensor cores, 32 numbers at a time: whole heads would spill."""
    WIDE: tl.constexpr = a.dtype == tl.float32 and a.shape[1] > 32
    if not WIDE:
        return tl.dot(a, b, input_precision="ieee")
    PARTS: tl.constexpr = a.shape[1] // 32
    left = tl.permute(tl.reshape(a, (a.shape[0], PARTS, 32)), (1, 0, 2))
    return tl.sum(tl.dot(left, tl.reshape(b, (PARTS, 32, b.shape[1])), input_precision="ieee"), 0)


@jit
def weighed(logits: tl.tensor, top: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of the next logits [R,T] of a softmax in base 2; its maximum and sum [R]; the factor of older sums."""
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
def empty_part(ROWS: tl.constexpr, BLOCK_V: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output of ROWS softmaxes before their first logits."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_V], tl.float32)


@jit
def log_sum(top: tl.tensor, total: tl.tensor, nothing: tl.constexpr) -> tl.tensor:
    """Base-2 log-sum-exp of rows from their maximum and sum; `nothing` for rows without a visible slot."""
    some = total > 0
    return tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), nothing)


@jit
def store_part(
    out_ptr: tl.tensor, lse_ptr: tl.tensor, places: tl.tensor, there: tl.tensor, top: tl.tensor, total: tl.tensor,
    out: tl.tensor, dims: tl.tensor, D_V: tl.constexpr,
) -> None:  # fmt: skip
    """Store output and natural log-sum-exp of query rows over some of their slots, for `join`; -inf without slots.

    Where all slots are one part, these are the results.
    """
    tl.store(lse_ptr + places, log_sum(top, total, float("-inf")) * 0.6931471805599453, mask=there)
    at = out_ptr + places[:, None] * D_V + dims[None, :]
    out /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(at, out, mask=there[:, None] & (dims < D_V)[None, :])


@jit
def with_sinks(
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    sinks_ptr: tl.tensor,
    heads: tl.tensor,
    there: tl.tensor,
    part: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Maximum, sum and output of rows of part 0 with the sink of their query head, which is in the sum only."""
    first = there & (part + heads * 0 == 0)
    sink = tl.load(sinks_ptr + heads, mask=first, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    fading = tl.exp2(top - shift)
    return new_top, total * fading + tl.exp2(sink - shift), out * fading[:, None]


def parts_of(like: Tensor, parts: int, heads: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Empty outputs [R,S,G*M,D_v] and log-sum-exps [R,S,G*M] of S parts, for `join`.

    like [B,H_q,M,D]: the queries. A single part is the result, so it has their dtype; other outputs are float32.
    """
    batch, query_heads, new = like.shape[:3]
    shape = batch * heads, parts, query_heads // heads * new
    out = like.new_empty(*shape, value_dim, dtype=like.dtype if parts == 1 else torch.float32)
    return out, like.new_empty(shape, dtype=torch.float32)


def slots_of_a_part(heads: int, slots: int, block: int, programs: int, most: int | None = None) -> int:
    """Slots of one program, a multiple of `block`, so that about `programs` programs cover `heads` of `slots` each."""
    even = -(-heads * slots // (programs * block)) * block
    return max(block, even if most is None else min(even, most))


def same_dtype(kernel: str, queries: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the multiplication. ValueError for float64, or if Triton is missing."""
    require_triton(kernel, queries.device)
    fit_heads(kernel, *(x.shape[-1] for x in (queries, *others)))
    dtype = queries.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    if dtype == torch.float64:
        raise ValueError(f"{kernel} computes in float32 and takes no float64 tensors: use the PyTorch path")
    return multipliable(*(x.to(dtype) for x in (queries, *others)))


class Dims(NamedTuple):
    """Numbers of a head, padded to a power of two, and the number that is multiplied at a time."""

    D: int
    WHOLE: int
    BLOCK: int


def dims_of(dim: int, dtype: torch.dtype) -> Dims:
    """A head's size in a tile, and the part that is multiplied at a time.

    Tensor cores multiply whole 16-bit tiles. float32 is multiplied without tensor cores, 32 dimensions at a time: whole
    heads would spill registers (8 KiB per thread at D = 256 on sm_90).
    """
    whole = max(16, next_power_of_two(dim))
    if dtype == torch.float32:
        return Dims(dim, max(32, whole), 32)
    return Dims(dim, whole, whole)

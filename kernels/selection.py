# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""The slots to keep of a ranking, their order, and their contents.

The kernel searches for the least preferred of the kept slots: one launch instead of sorts. A slot's preference is four
numbers that are compared in order: its score, its base score, its position and its number (earlier is better). Each is
an integer in the order of its values, so that 32 halvings find it exactly.

Shapes: B batch, H KV heads, T slots, n chosen slots of each KV head, D numbers of a slot.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.devices import on_gpu, on_host, use_triton
from kvbench.kernels.tiles import jit, require_triton, tl

BLOCK, WARPS = 4096, 16
LAST = torch.iinfo(torch.int64).max  # sorts after every position
MANY = 2**14  # the least number of elements that are copied by rows, which is faster


def preference(
    scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor, in_order: bool = False
) -> Tensor:
    """Slots [B,H,T] from the first to keep to the first to evict; empty slots (position -1) are last.

    in_order: no slot is empty and tokens are in order of position, which saves two sorts.
    """
    scores, tie_break = comparable(scores), None if tie_break is None else comparable(tie_break)
    if in_order:
        ranked = scores.masked_fill(protected, torch.inf)
        if tie_break is None:
            return ranked.argsort(dim=-1, descending=True, stable=True)
        order = tie_break.argsort(dim=-1, descending=True, stable=True)
        return order.gather(-1, ranked.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    empty = positions < 0
    order = positions.long().masked_fill(empty, LAST).argsort(dim=-1, stable=True)
    if tie_break is not None:
        order = order.gather(-1, tie_break.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    ranked = scores.masked_fill(protected, torch.inf).masked_fill(empty, -torch.inf)
    order = order.gather(-1, ranked.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    # A stored token may itself score -inf or tie with an empty slot; empty slots are still last.
    return order.gather(-1, empty.gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True))


def select(
    scores: Tensor,
    tie_break: Tensor | None,
    positions: Tensor,
    protected: Tensor,
    keep: Tensor | int,
    ascending: bool = False,
    packed: bool = False,
) -> Tensor:
    """The slots to keep: bool [B,H,T], min(keep, tokens stored) per KV head.

    scores, tie_break (optional) [B,H,T]; protected [B,H,T] bool; keep: an int or [B,H] counts. ascending: stored tokens
    are in order of position; packed: no slot is empty; False means unknown.
    """
    in_order = ascending and packed
    if use_triton(scores):
        return kept_slots(scores, tie_break, positions, protected, keep)
    if in_order and on_host(scores) and not isinstance(keep, Tensor) and 0 < keep < scores.shape[-1]:
        kept = _select_by_cut(scores, tie_break, protected, keep)
        if kept is not None:
            return kept
    order = preference(scores, tie_break, positions, protected, in_order)
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    chosen = ranks < (keep[..., None] if isinstance(keep, Tensor) else keep)
    return torch.zeros_like(protected).scatter_(-1, order, chosen) & (positions >= 0)


def _select_by_cut(scores: Tensor, tie_break: Tensor | None, protected: Tensor, keep: int) -> Tensor | None:
    """`select` for tokens in order of position, by a threshold on the scores: a fifth of a sort's time on a CPU.

    None if base scores have to decide between scores equal to the threshold.
    """
    ranked = comparable(scores).masked_fill(protected, torch.inf)
    cut = ranked.kthvalue(scores.shape[-1] - keep + 1, dim=-1, keepdim=True).values
    kept = ranked >= cut
    if bool((kept.sum(-1) == keep).all()):
        return kept
    if tie_break is not None:
        return None
    above, at_cut = ranked > cut, ranked == cut
    return above | at_cut & (at_cut.cumsum(-1) <= keep - above.sum(-1, keepdim=True))  # the first of equal scores


def comparable(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # 10x faster than a mask on a CPU


def spread_index(slots: Tensor, x: Tensor) -> Tensor:
    """slots [B,H,n] as an index into dimension 2 of x [B,H,C] or [B,H,C,D]."""
    return slots if x.dim() == 3 else slots.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])


def take(x: Tensor, slots: Tensor) -> Tensor:
    """x [B,H,C,...] at slots [B,H,n] -> [B,H,n,...]."""
    rows = _rows(x) if x.dim() == 4 and slots.numel() * x.shape[3] >= MANY else None
    if rows is None:
        return x.gather(2, spread_index(slots, x))
    sequence, head, slot = (stride // x.shape[3] for stride in x.stride()[:3])
    first = torch.arange(x.shape[0], device=x.device)[:, None] * sequence
    first = first + torch.arange(x.shape[1], device=x.device) * head
    places = slots * slot + first[..., None]
    return rows.index_select(0, places.flatten()).view(*slots.shape, x.shape[3])


def _rows(x: Tensor) -> Tensor | None:
    """The memory of x [B,H,C,D] as rows of D numbers; None if x has no such rows.

    Copying rows on a CPU is up to four times as fast as `gather`, which copies single numbers.
    """
    dim, strides = x.shape[3], x.stride()
    if on_gpu(x.device) or x.requires_grad or strides[3] != 1 or any(stride % dim for stride in strides[:3]):
        return None
    last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides, strict=False))
    return x.as_strided((last // dim + 1, dim), (dim, 1))


def extremes(mask: Tensor, count: int | None) -> tuple[int, int]:
    """The largest and the smallest number of slots of mask [B,H,C] per KV head; count: of every head, if known."""
    if count is not None and not on_host(mask):  # the host would wait for a number that it has already
        return count, count
    numbers = mask.sum(-1).flatten().tolist()
    assert count is None or set(numbers) == {count}, "the count differs from the mask"
    return max(numbers), min(numbers)


def partitioned(mask: Tensor) -> Tensor:
    """All slots [...,C]: those of mask bool [...,C] in order, then the others, the last one first; without a sort."""
    slots, ends = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask), mask.cumsum(-1)
    places = torch.where(mask, ends, mask.shape[-1] - slots + ends) - 1
    return torch.empty_like(places).scatter_(-1, places, slots)


def slots_in_order(positions: Tensor, mask: Tensor, most: int, ascending: bool, even: bool = True) -> Tensor:
    """The first `most` slots of mask [B,H,C] in order of positions [B,H,C].

    ascending: they are in this order. even: every head has `most`; else, other slots follow those of shorter ones.
    """
    if ascending and even and on_host(mask):  # on a GPU, the host would wait for `nonzero`
        return mask.nonzero()[:, -1].view(*mask.shape[:2], most)
    if ascending:
        return partitioned(mask)[..., :most]
    return positions.masked_fill(~mask, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)[..., :most]


# --- in one launch ---------------------------------------------------------------------------------------------------
class Ranked(NamedTuple):
    """Contiguous tensors [B,H,T] that decide the preference; ties None: there are no base scores."""

    scores: Tensor
    ties: Tensor | None
    positions: Tensor
    protected: Tensor


@jit
def _in_order(x: tl.tensor) -> tl.tensor:
    """Numbers as int32 in the order of their float32 values; NaN counts as -inf."""
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), tl.where(x == 0, 0.0, x))  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _preferred(
    ranked: Ranked, first: tl.tensor, slots: tl.tensor, T: tl.tensor, score: tl.tensor, tie: tl.tensor,
    place: tl.tensor, slot: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Which of the slots after `first` are stored tokens that are preferred at least as four numbers, the least."""
    here, at = slots < T, first + slots
    position = tl.load(ranked.positions + at, mask=here, other=-1).to(tl.int32)
    protected = tl.load(ranked.protected + at, mask=here, other=0)
    own = _in_order(tl.where(protected != 0, float("inf"), tl.load(ranked.scores + at, mask=here, other=0.0)))
    better = (-position > place) | ((-position == place) & (-slots >= slot))
    if ranked.ties is not None:
        base = _in_order(tl.load(ranked.ties + at, mask=here, other=0.0))
        better = (base > tie) | ((base == tie) & better)
    return ((own > score) | ((own == score) & better)) & (position >= 0)


@jit
def _count(
    ranked: Ranked, first: tl.tensor, T: tl.tensor, score: tl.tensor, tie: tl.tensor, place: tl.tensor,
    slot: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    found = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, T, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        found += _preferred(ranked, first, slots, T, score, tie, place, slot).to(tl.int32)
    return tl.sum(found, 0)


@partial(jit, varying=("keep", "T"))
def _keep(
    ranked: Ranked, counts_ptr: tl.tensor, kept_ptr: tl.tensor, keep: tl.tensor, T: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: the slots of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    first, most = row * T, keep
    if counts_ptr is not None:
        most = tl.load(counts_ptr + row).to(tl.int32)
    least = tl.full([], -(2**31), tl.int32)
    score, tie, place, slot = least, least, least, least
    for LEVEL in tl.static_range(4):
        more = most  # without a number at this level, all that are equal so far are preferred
        if LEVEL != 1 or ranked.ties is not None:
            more = _count(ranked, first, T, score, tie, place, slot, BLOCK)
        if more > most:
            low, high = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
            for _ in range(32):
                middle = low + ((high - low + 1) >> 1)
                tried = middle.to(tl.int32)
                found = _count(
                    ranked, first, T, tried if LEVEL == 0 else score, tried if LEVEL == 1 else tie,
                    tried if LEVEL == 2 else place, tried if LEVEL == 3 else slot, BLOCK,
                )  # fmt: skip
                low = tl.where(found >= most, middle, low)
                high = tl.where(found >= most, high, middle - 1)
            number = low.to(tl.int32)
            score, tie = number if LEVEL == 0 else score, number if LEVEL == 1 else tie
            place, slot = number if LEVEL == 2 else place, number if LEVEL == 3 else slot
    for begin in range(0, T, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        kept = _preferred(ranked, first, slots, T, score, tie, place, slot)
        tl.store(kept_ptr + first + slots, kept, mask=slots < T)


def kept_slots(
    scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor, keep: Tensor | int
) -> Tensor:
    """As `select`, which sorts: bool [B,H,T]."""
    require_triton("selection", scores.device)
    kept = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    scores, positions, protected = (x.expand(kept.shape).contiguous() for x in (scores, positions, protected))
    ties = None if tie_break is None else tie_break.expand(kept.shape).contiguous()
    counts = keep.expand(kept.shape[:2]).contiguous() if isinstance(keep, Tensor) else None
    most = 0 if isinstance(keep, Tensor) else keep
    ranked = Ranked(scores, ties, positions, protected)
    _keep[kept.shape[:2].numel(),](ranked, counts, kept, most, kept.shape[2], BLOCK, num_warps=WARPS)
    return kept

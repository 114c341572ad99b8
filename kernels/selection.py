# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""The slots to keep of a ranking, by a search for the least preferred of them: one launch instead of sorts.

A slot's preference is four numbers that are compared in order: its score, its base score, its position and its number
(earlier is better). Each is an integer in the order of its values, so that 32 halvings find it exactly.

Shapes: B batch, H KV heads, T slots.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.tiles import jit, require_triton, tl

BLOCK, WARPS = 4096, 16


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
    """As `kvbench.policies.ranking.select`, which sorts: bool [B,H,T]."""
    require_triton("selection", scores.device)
    kept = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    scores, positions, protected = (x.expand(kept.shape).contiguous() for x in (scores, positions, protected))
    ties = None if tie_break is None else tie_break.expand(kept.shape).contiguous()
    counts = keep.expand(kept.shape[:2]).contiguous() if isinstance(keep, Tensor) else None
    most = 0 if isinstance(keep, Tensor) else keep
    ranked = Ranked(scores, ties, positions, protected)
    _keep[kept.shape[:2].numel(),](ranked, counts, kept, most, kept.shape[2], BLOCK, num_warps=WARPS)
    return kept

# ruff: noqa: N803, N806 - in kernels, sizes have their names in shapes
"""The slots to keep of a ranking, by a search for the least preferred of them: one launch instead of sorts.

A slot's preference is four numbers that are compared in order: its score, its base score, its position and its number
(earlier is better). Each is an integer in the order of its values, so that 32 halvings find it exactly.

Shapes: B batch, H KV heads, T slots.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.tiles import jit, require_triton, tl

BLOCK, WARPS = 4096, 16


@partial(jit)
def _in_order(x: tl.tensor) -> tl.tensor:
    """float32 numbers as int32 in the same order; NaN counts as -inf."""
    x = tl.where(x != x, float("-inf"), tl.where(x == 0, 0.0, x))  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@partial(jit)
def _preferred(
    scores_ptr: tl.tensor, ties_ptr: tl.tensor, positions_ptr: tl.tensor, protected_ptr: tl.tensor, slots: tl.tensor,
    T: tl.tensor, score: tl.tensor, tie: tl.tensor, place: tl.tensor, slot: tl.tensor, TIES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which of the slots are stored tokens that are preferred at least as the least preference of four numbers."""
    here = slots < T
    position = tl.load(positions_ptr + slots, mask=here, other=-1).to(tl.int32)
    protected = tl.load(protected_ptr + slots, mask=here, other=0)
    x = tl.load(scores_ptr + slots, mask=here, other=0.0).to(tl.float32)
    own = _in_order(tl.where(protected != 0, float("inf"), x))
    better = (-position > place) | ((-position == place) & (-slots >= slot))
    if TIES:
        base = _in_order(tl.load(ties_ptr + slots, mask=here, other=0.0).to(tl.float32))
        better = (base > tie) | ((base == tie) & better)
    return ((own > score) | ((own == score) & better)) & (position >= 0)


@partial(jit, varying=("T",))
def _count(
    scores_ptr: tl.tensor, ties_ptr: tl.tensor, positions_ptr: tl.tensor, protected_ptr: tl.tensor, T: tl.tensor,
    score: tl.tensor, tie: tl.tensor, place: tl.tensor, slot: tl.tensor, TIES: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    found = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, T, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        found += _preferred(
            scores_ptr, ties_ptr, positions_ptr, protected_ptr, slots, T, score, tie, place, slot, TIES
        ).to(tl.int32)  # fmt: skip
    return tl.sum(found, 0)


@partial(jit, varying=("keep", "T"))
def _keep(
    scores_ptr: tl.tensor, ties_ptr: tl.tensor, positions_ptr: tl.tensor, protected_ptr: tl.tensor,
    counts_ptr: tl.tensor, kept_ptr: tl.tensor, keep: tl.tensor, T: tl.tensor, TIES: tl.constexpr,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the slots of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr, ties_ptr, positions_ptr = scores_ptr + row * T, ties_ptr + row * T, positions_ptr + row * T
    protected_ptr, kept_ptr = protected_ptr + row * T, kept_ptr + row * T
    most = tl.load(counts_ptr + row).to(tl.int32) if COUNTED else keep
    least = tl.full([], -(2**31), tl.int32)
    score, tie, place, slot = least, least, least, least
    for LEVEL in tl.static_range(4):
        more = most  # without a number at this level, all that are equal so far are preferred
        if LEVEL != 1 or TIES:
            more = _count(
                scores_ptr, ties_ptr, positions_ptr, protected_ptr, T, score, tie, place, slot, TIES, BLOCK
            )  # fmt: skip
        if more > most:
            low, high = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
            for _ in range(32):
                middle = low + ((high - low + 1) >> 1)
                tried = middle.to(tl.int32)
                found = _count(
                    scores_ptr, ties_ptr, positions_ptr, protected_ptr, T,
                    tried if LEVEL == 0 else score, tried if LEVEL == 1 else tie,
                    tried if LEVEL == 2 else place, tried if LEVEL == 3 else slot, TIES, BLOCK,
                )  # fmt: skip
                low = tl.where(found >= most, middle, low)
                high = tl.where(found >= most, high, middle - 1)
            number = low.to(tl.int32)
            score, tie = number if LEVEL == 0 else score, number if LEVEL == 1 else tie
            place, slot = number if LEVEL == 2 else place, number if LEVEL == 3 else slot
    for begin in range(0, T, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        kept = _preferred(
            scores_ptr, ties_ptr, positions_ptr, protected_ptr, slots, T, score, tie, place, slot, TIES
        )  # fmt: skip
        tl.store(kept_ptr + slots, kept, mask=slots < T)


def kept_slots(
    scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor, keep: Tensor | int
) -> Tensor:
    """As `kvbench.policies.ranking.select`, which sorts: bool [B,H,T]."""
    require_triton("selection", scores.device)
    kept = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    scores, positions, protected = (x.expand(kept.shape).contiguous() for x in (scores, positions, protected))
    ties = scores if tie_break is None else tie_break.expand(kept.shape).contiguous()
    counted = isinstance(keep, Tensor)
    counts = keep.expand(kept.shape[:2]).contiguous() if isinstance(keep, Tensor) else positions
    most, slots = 0 if isinstance(keep, Tensor) else keep, scores.shape[2]
    _keep[kept.shape[0] * kept.shape[1],](
        scores, ties, positions, protected, counts, kept, most, slots, tie_break is not None, counted, BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return kept

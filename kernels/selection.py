# ruff: noqa: N803 - in kernels, sizes have their names in shapes
"""The slots to keep of a ranking, by counting for each slot how many are preferred to it: one launch instead of sorts.

Shapes: B batch, H KV heads, T slots.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.tiles import jit, require_triton, tl

TILE = 64
LONGEST = 2**13  # slots: comparisons grow with their square, and sorts are faster for more
COUNTS = ("keep", "T")


@partial(jit, varying=COUNTS)
def _keep(
    scores_ptr: tl.tensor, ties_ptr: tl.tensor, positions_ptr: tl.tensor, protected_ptr: tl.tensor,
    counts_ptr: tl.tensor, kept_ptr: tl.tensor, keep: tl.tensor, T: tl.tensor, TIES: tl.constexpr,
    COUNTED: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a tile of slots of one KV head, compared with all its slots."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    most = tl.load(counts_ptr + row).to(tl.int32) if COUNTED else keep
    own = first + tl.arange(0, TILE)
    here = own < T
    score = _score(scores_ptr + row * T + own, protected_ptr + row * T + own, here)[:, None]
    position = tl.load(positions_ptr + row * T + own, mask=here, other=-1)[:, None]
    tie = _number(tl.load(ties_ptr + row * T + own, mask=here, other=0.0))[:, None] if TIES else score
    preferred = tl.zeros([TILE, TILE], tl.int32)
    for begin in range(0, T, TILE):
        slots = begin + tl.arange(0, TILE)
        inside = slots < T
        other = _score(scores_ptr + row * T + slots, protected_ptr + row * T + slots, inside)[None, :]
        place = tl.load(positions_ptr + row * T + slots, mask=inside, other=-1)[None, :]
        earlier = (place < position) | ((place == position) & (slots[None, :] < own[:, None]))
        if TIES:
            base = _number(tl.load(ties_ptr + row * T + slots, mask=inside, other=0.0))[None, :]
            earlier = (base > tie) | ((base == tie) & earlier)
        better = (other > score) | ((other == score) & earlier)
        preferred += (better & (place >= 0)).to(tl.int32)
    rank = tl.sum(preferred, 1)
    tl.store(kept_ptr + row * T + own[:, None], (rank[:, None] < most) & (position >= 0), mask=here[:, None])


@partial(jit)
def _number(x: tl.tensor) -> tl.tensor:
    """NaN counts as -inf."""
    return tl.where(x != x, float("-inf"), x)


@partial(jit)
def _score(at: tl.tensor, protected_at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Scores, infinite for protected tokens."""
    protected = tl.load(protected_at, mask=mask, other=0)
    return tl.where(protected != 0, float("inf"), _number(tl.load(at, mask=mask, other=0.0)))


def kept_slots(
    scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor, keep: Tensor | int
) -> Tensor:
    """As `kvbench.policies.ranking.select`, for at most LONGEST slots: bool [B,H,T]."""
    require_triton("selection", scores.device)
    rows, slots = scores.shape[0] * scores.shape[1], scores.shape[2]
    kept = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    scores, positions, protected = (x.expand(kept.shape).contiguous() for x in (scores, positions, protected))
    ties = scores if tie_break is None else tie_break.expand(kept.shape).contiguous()
    counted = isinstance(keep, Tensor)
    counts = keep.expand(kept.shape[:2]).contiguous() if isinstance(keep, Tensor) else positions
    most = 0 if isinstance(keep, Tensor) else keep
    _keep[rows, -(-slots // TILE)](
        scores, ties, positions, protected, counts, kept, most, slots, tie_break is not None, counted, TILE
    )
    return kept

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Value errors: what evicting each token alone would change in the attention output (CAOTE, FastCAOTE).

Two launches. The first sums values, weighted by scores, over pieces of the slots. The second adds the pieces up to the
centre X and reads every value once more for ||X - v||: from the differences, because ||X||^2 - 2 X.v + ||v||^2 loses
all digits where a value lies near X. At a budget's size the values are in L2 by then.
Shapes: B batch, H KV heads, K score rows per KV head, T slots, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.jit import at_head, jit, next_power_of_two, require_triton, rows, tl

PROGRAMS = 512  # pieces of all heads together: a few for each of 132 processors
PIECE = 64  # slots of a piece, at least
REGISTERS = 128  # of a thread of `_errors`, at most; left alone, ptxas takes 40 to 56 and spills a few


def value_errors_ref(
    scores: Tensor, values: Tensor, counted: Tensor | None, eps: float, from_mean: bool = False
) -> Tensor:
    """The definition, with [B,H,K,T,D] differences. Arguments and result as in `value_errors_triton`."""
    if counted is None:
        counted = torch.ones(values.shape[:3], dtype=torch.bool, device=values.device)
    scores = scores.float().masked_fill(~counted[:, :, None], 0.0)
    values = values.float().masked_fill(~counted[..., None], 0.0)
    even = counted / counted.sum(-1, keepdim=True).clamp(min=1)
    total = scores.sum(-1, keepdim=True)
    alpha = torch.where(total > 0, scores / total, even[:, :, None])
    centre = (even[:, :, None] if from_mean else alpha) @ values  # [B,H,K,D], or one for all K
    distance: Tensor = (centre[:, :, :, None] - values[:, :, None]).norm(dim=-1)
    return alpha / (1 - alpha).clamp(min=eps) * distance


@jit
def _counting(counted: tl.tensor, row: tl.tensor, H: tl.tensor, slots: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Which of a KV head's slots `inside` count: all, without flags."""
    if counted is not None:
        inside = inside & (tl.load(at_head(counted, row, H) + slots, mask=inside, other=0) != 0)
    return inside


@jit
def _numbers(
    x: tl.tensor, row: tl.tensor, H: tl.tensor, slots: tl.tensor, there: tl.tensor, D: tl.tensor, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Values of a KV head in float32, [slots,BLOCK_D], 0 where there is none."""
    dims = tl.arange(0, BLOCK_D)
    rows = at_head(x, row, H) + slots.to(tl.int64)[:, None] * x.row + dims[None, :]
    return tl.load(rows, mask=there[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)


@jit
def _centres(
    scores: tl.tensor,
    values: tl.tensor,
    counted: tl.tensor,
    totals_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    piece: tl.tensor,
    K: tl.constexpr,
    FROM_MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: a piece of one KV head's slots. Sums of scores and of values so weighted; row K: plain ones."""
    row = tl.program_id(0).to(tl.int64)
    out = (row * tl.num_programs(1) + tl.program_id(1)) * (K + 1)
    dims = tl.arange(0, BLOCK_D)
    first = tl.program_id(1) * piece
    for k in range(K):  # not unrolled: one row's sums at a time fit the registers
        scores_ptr = at_head(scores, row, H) + tl.cast(k, tl.int64) * scores.row
        total = tl.zeros([BLOCK_T], tl.float32)
        number = tl.zeros([BLOCK_T], tl.float32)
        sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        plain = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, piece, BLOCK_T):
            slots = first + start + tl.arange(0, BLOCK_T)
            counts = _counting(counted, row, H, slots, (slots < T) & (start + tl.arange(0, BLOCK_T) < piece))
            weights = tl.load(scores_ptr + slots, mask=counts, other=0.0)
            there = counts
            if FROM_MEAN:
                there = counts & (slots < T - k * T)  # the mean is the same for all rows: values are read once
            own = _numbers(values, row, H, slots, there, D, BLOCK_D)
            plain += own
            number += tl.where(counts, 1.0, 0.0)
            total += weights
            if not FROM_MEAN:
                sums += weights[:, None] * own
        tl.store(totals_ptr + out + k, tl.sum(total, 0))
        tl.store(totals_ptr + out + K, tl.sum(number, 0))
        if FROM_MEAN:
            tl.store(sums_ptr + (out + K) * BLOCK_D + dims, tl.sum(plain, 0), mask=dims < BLOCK_D - k * BLOCK_D)
        else:
            tl.store(sums_ptr + (out + K) * BLOCK_D + dims, tl.sum(plain, 0))
            tl.store(sums_ptr + (out + k) * BLOCK_D + dims, tl.sum(sums, 0))


@jit
def _added_up(
    ptr: tl.tensor, pieces: tl.tensor, wanted: tl.tensor, K: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Sum over pieces of one of K + 1 vectors, 16 pieces in flight; 0 where none is wanted."""
    dims = tl.arange(0, BLOCK_D)
    sums = tl.zeros([16, BLOCK_D], tl.float32)
    for start in range(0, pieces, 16):
        some = start + tl.arange(0, 16)
        vectors = ptr + some[:, None] * ((K + 1) * BLOCK_D) + dims[None, :]
        sums += tl.load(vectors, mask=(some < tl.where(wanted, pieces, 0))[:, None] & (dims >= 0)[None, :], other=0.0)
    return tl.sum(sums, 0)


@jit
def _errors(
    scores: tl.tensor,
    values: tl.tensor,
    counted: tl.tensor,
    totals_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    piece: tl.tensor,
    pieces: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    FROM_MEAN: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: the errors of a piece of one KV head's slots, for all its score rows."""
    row = tl.program_id(0).to(tl.int64)
    totals_ptr += row * pieces * (K + 1)
    sums_ptr += row * pieces * (K + 1) * BLOCK_D
    lanes = tl.arange(0, PIECES)
    number = tl.sum(tl.load(totals_ptr + lanes * (K + 1) + K, mask=lanes < pieces, other=0.0), 0)
    number = tl.maximum(number, 1.0)
    for k in range(K):
        total = tl.sum(tl.load(totals_ptr + lanes * (K + 1) + k, mask=lanes < pieces, other=0.0), 0)
        scores_ptr = at_head(scores, row, H) + tl.cast(k, tl.int64) * scores.row
        some = total > 0
        divisor = tl.where(some, total, number)
        if FROM_MEAN:
            centre = _added_up(sums_ptr + K * BLOCK_D, pieces, number > 0, K, BLOCK_D) / number
        else:
            centre = _added_up(sums_ptr + k * BLOCK_D, pieces, total > 0, K, BLOCK_D)
            centre += _added_up(sums_ptr + K * BLOCK_D, pieces, total <= 0, K, BLOCK_D)  # all scores are 0
            centre /= divisor
        for start in range(0, piece, BLOCK_T):
            slots = tl.program_id(1) * piece + start + tl.arange(0, BLOCK_T)
            inside = (slots < T) & (start + tl.arange(0, BLOCK_T) < piece)
            counts = _counting(counted, row, H, slots, inside)
            own = _numbers(values, row, H, slots, counts, D, BLOCK_D)
            weights = tl.load(scores_ptr + slots, mask=counts, other=0.0)
            if not FROM_MEAN:  # X is the value that has all weight: what its quotient rounds, 1 / eps would make large
                weights = tl.where(weights == total, 0.0, weights)
            alpha = tl.where(some, weights, 1.0) / divisor
            away = own - centre[None, :]  # both are 0 beyond D
            errors = alpha / tl.maximum(1 - alpha, eps) * tl.sqrt(tl.sum(away * away, 1))
            tl.store(out_ptr + (row * K + k) * T + slots, tl.where(counts, errors, 0.0), mask=inside)


def tiles(dim: int) -> dict[str, int]:
    """Slots of a tile, and warps: 32 numbers of values for each thread, 16 bytes of them side by side.

    Heads of more than 128 numbers take twice the warps: with 4 the float32 loads of sm_100 are of 4 bytes.
    """
    block = next_power_of_two(dim)
    warps = 4 if block <= 128 else 8
    return {"BLOCK_T": max(16, 1024 * warps // block), "BLOCK_D": block, "num_warps": warps}


def value_errors_triton(
    scores: Tensor, values: Tensor, counted: Tensor | None, eps: float, from_mean: bool = False
) -> Tensor:
    """c_j = alpha_j / max(1 - alpha_j, eps) * ||X - v_j|| for K score rows per KV head, [B,H,K,T] float32.

    scores [B,H,K,T] >= 0 are divided by their sum to give alpha (all alike where that is 0); values [B,H,T,D]; counted
    bool [B,H,T], None if all slots count: the others are 0 in alpha and may hold anything. X = sum_j alpha_j v_j, or
    with from_mean the plain mean of the values. Any strides whose last is 1 (else copied); no tensor of [.., T, D] is
    made. CUDA tensors; CPU tensors under TRITON_INTERPRET=1. ValueError for float64 and where Triton is missing.
    Source: Goel et al. 2025, arXiv 2504.14051, eq. 8 and 20-23.
    """
    require_triton("value_errors", values.device)
    if torch.float64 in (scores.dtype, values.dtype):
        raise ValueError("value_errors_triton sums in float32 and takes no float64 tensors")
    batch, heads, length, dim = values.shape
    errors = torch.empty(batch, heads, scores.shape[2], length, dtype=torch.float32, device=values.device)
    if not errors.numel():
        return errors
    if not values.is_cuda and values.dtype == torch.bfloat16:
        values = values.float()  # Triton's interpreter reads the bit patterns of bfloat16
    how = tiles(dim)
    least = max(PIECE, how["BLOCK_T"])
    piece = -(-length // max(1, min(PROGRAMS // (batch * heads), -(-length // least))))
    pieces = -(-length // piece)
    number = scores.shape[2]
    totals = errors.new_empty(batch * heads, pieces, number + 1)
    sums = errors.new_empty(batch * heads, pieces, number + 1, how["BLOCK_D"])
    views = rows(scores.float()), rows(values), None if counted is None else rows(counted)
    sizes = heads, length, dim, piece
    flags = {"K": number, "FROM_MEAN": from_mean, **how}
    with torch.cuda.device_of(values):
        _centres[batch * heads, pieces](*views, totals, sums, *sizes, **flags)
        flags["PIECES"] = next_power_of_two(pieces)
        _errors[batch * heads, pieces](*views, totals, sums, errors, *sizes, pieces, eps, **flags, maxnreg=REGISTERS)
    return errors

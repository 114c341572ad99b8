# ruff: noqa: N803, N806, SIM300 - in kernels, sizes have the names they have in shapes
"""Groups of keys or values to packed codes, in one pass: least and greatest number, scale, codes, words.

x = code * scale + minimum with scale = (max - min) / (2^bits - 1); scale and minimum are rounded to the dtype they
are held in and codes follow from the rounded ones, as in policies/stores/quantiser.py, to the last bit: divisions are
IEEE's, halves round to even. Tokens kept elsewhere can be replaced by a row that stands in for them (OTT).

Shapes: B batch, H KV heads, T tokens, D head dim, U numbers of a group, W int32 words of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import at_head, jit, next_power_of_two, require_triton, tl, view

WORD = 32
LARGEST_GROUP = 1024  # numbers a program holds of a group at once


class Groups(NamedTuple):
    """Per channel (groups of U tokens): words [B,H,T/U,D,W], scale, minimum [B,H,T/U,D]; per token (groups of U
    channels): words [B,H,T,D/U,W], scale, minimum [B,H,T,D/U]."""

    words: Tensor
    scale: Tensor
    minimum: Tensor


class Filled(NamedTuple):
    """Tokens to be replaced, bool [B,H,T], and by what: rows [B,H,T/each,D] in float32, one for `each` tokens."""

    traced: Tensor
    rows: Tensor
    each: int


def quantise_ref(
    x: Tensor,
    unit: int,
    per_token: bool,
    bits: int,
    held_in: torch.dtype,
    arithmetic: torch.dtype = torch.float32,
    filled: Filled | None = None,
) -> Groups:
    """The definition. x [B,H,T,D]; `unit` U, the numbers of a group; `arithmetic`: the dtype of every intermediate."""
    if filled is not None:
        x = torch.where(filled.traced[..., None], filled.rows.repeat_interleave(filled.each, dim=2), x.float())
    x = x.to(arithmetic)
    groups = x.unflatten(3, (-1, unit)) if per_token else x.unflatten(2, (-1, unit)).transpose(-1, -2)
    low, high, levels = groups.amin(-1), groups.amax(-1), 2**bits - 1
    scale, minimum = (
        ((high - low) / torch.tensor(levels, dtype=arithmetic, device=x.device)).to(held_in),
        low.to(held_in),
    )
    step = scale.to(arithmetic)
    codes = (groups - minimum.to(arithmetic)[..., None]) / step.masked_fill(step == 0, torch.inf)[..., None]
    codes = codes.round().clamp(0, levels).long()
    codes = torch.nn.functional.pad(codes, (0, -unit % (WORD // bits))).unflatten(-1, (-1, WORD // bits))
    words = (codes << torch.arange(0, WORD, bits, device=x.device)).sum(-1)
    return Groups(torch.where(words < 2**31, words, words - 2**32).to(torch.int32), scale, minimum)


@jit
def _rounded(x: tl.tensor, ARITHMETIC: tl.constexpr) -> tl.tensor:
    """x float32 as a computation in dtype ARITHMETIC would have left it."""
    if ARITHMETIC == tl.bfloat16:  # by hand: Triton's interpreter cuts bfloat16 off (3.9)
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    elif ARITHMETIC == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@jit
def _coded(
    numbers: tl.tensor,
    there: tl.tensor,
    inside: tl.tensor,
    HELD_IN: tl.constexpr,
    BITS: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scale, minimum and words of BLOCK groups of WIDTH numbers, of those that are there; 0 of groups not inside."""
    PER_WORD: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    low = tl.min(tl.where(there, numbers, float("inf")), 1)
    low = tl.where(tl.max((numbers != numbers).to(tl.int32), 1) > 0, float("nan"), low)  # min and max skip NaN
    high = tl.max(tl.where(there, numbers, float("-inf")), 1)
    low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
    span = _rounded(high - low, ARITHMETIC)
    scale = _rounded(tl.div_rn(span, tl.full([BLOCK], LEVELS, tl.float32)), ARITHMETIC).to(HELD_IN)
    minimum = low.to(HELD_IN)
    step = _rounded(scale.to(tl.float32), ARITHMETIC)
    step = tl.where(step == 0, float("inf"), step)
    above = _rounded(numbers - _rounded(minimum.to(tl.float32), ARITHMETIC)[:, None], ARITHMETIC)
    codes = _rounded(tl.div_rn(above, tl.broadcast_to(step[:, None], above.shape)), ARITHMETIC)
    codes = tl.minimum(tl.maximum(codes, 0.0), LEVELS)
    codes = (codes + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 leaves no room for fractions: halves round to even
    codes = tl.where(there, codes, 0.0).to(tl.int32)
    codes = tl.reshape(codes, (BLOCK, WIDTH // PER_WORD, PER_WORD))
    return scale, minimum, tl.sum(codes << (tl.arange(0, PER_WORD) * BITS)[None, None, :], 2)


@jit
def _quantise(
    x: tl.tensor,
    traced_ptr: tl.tensor,
    fill_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    groups: tl.tensor,
    D: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    FILL_EACH: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program: BLOCK of the `groups` groups of one KV head, each of U numbers in WIDTH places."""
    blocks = tl.cdiv(groups, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    group = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, WIDTH)[None, :]
    if PER_TOKEN:
        token, dim = group[:, None] // (D // U) + number * 0, group[:, None] % (D // U) * U + number
    else:
        token, dim = group[:, None] // D * U + number, group[:, None] % D + number * 0
    there = (group < groups)[:, None] & (number < U)
    at = at_head(x, row, H) + token.to(tl.int64) * x.row + dim.to(tl.int64) * x.dim
    numbers = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if FILL_EACH > 0:
        traced = tl.load(traced_ptr + row * T + token, mask=there, other=0) != 0
        fill = tl.load(
            fill_ptr + (row * (T // FILL_EACH) + token // FILL_EACH) * D + dim, mask=there & traced, other=0.0
        )
        numbers = tl.where(traced, _rounded(fill, ARITHMETIC), numbers)
    numbers = _rounded(numbers, ARITHMETIC)
    scale, minimum, words = _coded(
        numbers, there, group < groups, scale_ptr.dtype.element_ty, BITS, ARITHMETIC, BLOCK, WIDTH
    )  # fmt: skip
    word = tl.arange(0, WIDTH * BITS // 32)[None, :]
    place = row * groups + group
    tl.store(scale_ptr + place, scale, mask=group < groups)
    tl.store(minimum_ptr + place, minimum, mask=group < groups)
    tl.store(words_ptr + place[:, None] * W + word, words, mask=(group < groups)[:, None] & (word < W))


def quantise_triton(
    x: Tensor,
    unit: int,
    per_token: bool,
    bits: int,
    held_in: torch.dtype,
    arithmetic: torch.dtype = torch.float32,
    filled: Filled | None = None,
) -> Groups:
    """`quantise_ref` in one launch, the same bits. CUDA tensors, any strides; under TRITON_INTERPRET=1 CPU tensors.

    Groups of up to LARGEST_GROUP numbers. ValueError where Triton is missing.
    """
    require_triton("quantise", x.device)
    assert unit <= LARGEST_GROUP, "the numbers of a group lie in one program's registers"
    batch, heads, tokens, dim = x.shape
    outer = (tokens, dim // unit) if per_token else (tokens // unit, dim)
    words = -(-unit * bits // WORD)
    scale = torch.empty(batch, heads, *outer, dtype=held_in, device=x.device)
    minimum = torch.empty_like(scale)
    packed = torch.empty(batch, heads, *outer, words, dtype=torch.int32, device=x.device)
    groups, width = outer[0] * outer[1], max(next_power_of_two(unit), WORD // bits)
    block = max(1, min(64, 8192 // width, next_power_of_two(groups)))
    traced, rows, each = (packed, scale, 0) if filled is None else filled
    if filled is not None:
        traced, rows = traced.to(torch.uint8).contiguous(), rows.contiguous()
    with torch.cuda.device_of(x):
        _quantise[-(-groups // block) * batch * heads,](
            view(x), traced, rows, packed, scale, minimum, heads, tokens, groups,
            D=dim, U=unit, W=words, BITS=bits, PER_TOKEN=per_token, FILL_EACH=each,
            ARITHMETIC=getattr(tl, str(arithmetic).removeprefix("torch.")), BLOCK=block, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return Groups(packed, scale, minimum)

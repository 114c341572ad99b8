# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""One tile of slots of one KV head, as decode attention takes it: who sees whom, logits, weights, output so far."""

from __future__ import annotations

from kvbench.kernels.jit import at_head, jit, tl
from kvbench.kernels.prompt_tiles import hidden, logits_of, tile, weighed


@jit
def append_token(
    x: tl.tensor,
    rows: tl.tensor,
    new: tl.tensor,
    kv_row: tl.tensor,
    H_kv: tl.tensor,
    slot: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A head's new token, written into its slot of x at `rows` where that is one of the slots `first` up to `end`."""
    dims = tl.arange(0, BLOCK_D)
    there = (dims < D) & (slot + dims * 0 >= first) & (slot + dims * 0 < end)
    numbers = tl.load(at_head(new, kv_row, H_kv) + dims * new.dim, mask=there)
    tl.store(rows + slot * x.row + dims * x.dim, numbers, mask=there)


@jit
def attend_tile(
    q: tl.tensor,
    q_rows: tl.tensor,
    q_dim: tl.tensor,
    q_place: tl.tensor,
    there: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_pos: tl.tensor,
    bias: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_pos_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    logits_at: tl.tensor,
    slots: tl.tensor,
    length: tl.tensor,
    newest: tl.tensor,
    oldest: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    DIMS: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output of query rows after the `slots` of one tile; logits are in base 2."""
    wide = slots.to(tl.int64)
    needed = slots < length
    if k_pos is not None:  # what no query of this tile may see is not even read
        k_place = tl.load(k_pos_ptr + wide * k_pos.row, mask=needed, other=-1).to(tl.int32)
        needed = (k_place >= 0) & (k_place <= newest)
        if window is not None:
            needed = needed & (k_place > oldest - window)
    k_rows = k_ptr + wide * k.row
    logits = logits_of(q, q_rows, there, q_dim, k_rows, needed, k.dim, scale, cap, DIMS)
    if bias is not None:
        added = tl.load(bias_ptr + wide * bias.row, mask=needed, other=0.0)
        logits += added[None, :] * 1.4426950408889634
    logits = tl.where(needed[None, :], logits, float("-inf"))
    if k_pos is not None:
        logits = hidden(logits, q_place[:, None], k_place[None, :], window)
    if logits_at is not None:
        tl.store(logits_at[:, None] + wide[None, :], logits, mask=there[:, None] & (slots < length)[None, :])
    weights, top, total, fading = weighed(logits, top, total)
    values = tile(v_ptr + wide * v.row, needed, v.dim, 0, D_V, BLOCK_V)
    out = tl.dot(weights.to(values.dtype), values, out * fading[:, None], input_precision="ieee")
    return top, total, out


@jit
def store_part(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    places: tl.tensor,
    there: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    dims: tl.tensor,
    D_V: tl.constexpr,
) -> None:
    """Output and natural log-sum-exp of query rows over some of their slots, for `_finish` to join; -inf of none."""
    some = tl.where(total > 0, total, 1.0)
    tl.store(lse_ptr + places, (top + tl.log2(some)) * 0.6931471805599453, mask=there)
    at = out_ptr + places[:, None] * D_V + dims[None, :]
    tl.store(at, out / some[:, None], mask=there[:, None] & (dims < D_V)[None, :])

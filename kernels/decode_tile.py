# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""One tile of slots of one KV head, as decode attention takes it: who sees whom, logits, weights, output so far."""

from __future__ import annotations

from typing import NamedTuple

from kvbench.kernels.jit import View, jit, tl
from kvbench.kernels.prompt_tiles import Rule, Vectors, attend, hidden, log_sum, logits_of, tile


class Slots(NamedTuple):
    """Keys k [..,T,D] and values v [..,T,D_v], and perhaps positions and a bias [..,T] of their logits."""

    k: View
    v: View
    positions: View | None
    bias: View | None


class Asking(NamedTuple):
    """Query rows of a KV head, the first numbers `held`; their places in time, of which `newest` and `oldest`."""

    rows: Vectors
    held: tl.tensor
    places: tl.tensor
    newest: tl.tensor
    oldest: tl.tensor


@jit
def append_token(
    x: View, new: View, slot: tl.tensor, first: tl.tensor, end: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> None:
    """A head's new token, written into its slot of x where that is one of the slots `first` up to `end`."""
    dims = tl.arange(0, BLOCK_D)
    there = (dims < D) & (slot + dims * 0 >= first) & (slot + dims * 0 < end)
    numbers = tl.load(new.ptr + dims * new.dim, mask=there)
    tl.store(x.ptr + slot * x.row + dims * x.dim, numbers, mask=there)


@jit
def attend_tile(
    asking: Asking,
    stored: Slots,
    logits_at: tl.tensor,
    slots: tl.tensor,
    length: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    rule: Rule,
    DIMS: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and output of query rows after the `slots` of one tile of a head; logits in base 2."""
    wide = slots.to(tl.int64)
    needed = slots < length
    if stored.positions is not None:  # what no query of this tile may see is not even read
        places = tl.load(stored.positions.ptr + wide * stored.positions.row, mask=needed, other=-1).to(tl.int32)
        needed = (places >= 0) & (places <= asking.newest)
        if rule.window is not None:
            needed = needed & (places > asking.oldest - rule.window)
    keys = Vectors(stored.k.ptr + wide * stored.k.row, needed, stored.k.dim)
    logits = logits_of(asking.held, asking.rows, keys, rule, DIMS)
    if stored.bias is not None:
        added = tl.load(stored.bias.ptr + wide * stored.bias.row, mask=needed, other=0.0)
        logits += added[None, :] * 1.4426950408889634
    logits = tl.where(needed[None, :], logits, float("-inf"))
    if stored.positions is not None:
        logits = hidden(logits, asking.places[:, None], places[None, :], rule.window)
    if logits_at is not None:
        there = asking.rows.there[:, None] & (slots < length)[None, :]
        tl.store(logits_at[:, None] + wide[None, :], logits, mask=there)
    values = Vectors(stored.v.ptr + wide * stored.v.row, needed, stored.v.dim)
    top, total, out = attend(logits, tile(values, 0, D_V, BLOCK_V), top, total, out)
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
    tl.store(lse_ptr + places, log_sum(top, total, float("-inf")) * 0.6931471805599453, mask=there)
    at = out_ptr + places[:, None] * D_V + dims[None, :]
    out /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(at, out, mask=there[:, None] & (dims < D_V)[None, :])

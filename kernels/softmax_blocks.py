"""Softmax rows of some queries at a time, in memory linear in the number of slots: what sums over whole prompts read.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries of a call, R of a block, T slots, S of them
in reach of a block, D head dim. Logits are in base 2: on CPUs exp2 takes a third of the time of exp.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import visible, widen

LOG2E = math.log2(math.e)
NOWHERE = 2**30  # a position later than every query
FEW_QUERIES = 8  # up to here the rows themselves are small and cost less than the bookkeeping of blocks
LOGITS_AT_ONCE = 2**22  # CPU: 16 MiB of float32; smaller blocks wake the threads too often, larger ones leave the cache
QUERIES_AT_ONCE = 128  # CPU: a block reaches as far as its last query, so that large ones compute what nobody sees
NO_SHIFT = 100.0  # logits (base 2) that are smaller on either side need no row maximum: float32 holds their powers' sum
LOGITS_AT_ONCE_GPU = 2**26  # 256 MiB, so that a launch has something to do; not measured


def _extent(flags: Tensor) -> slice:
    """The shortest range that holds every true entry of flags [T]."""
    entries = flags.nonzero()
    return slice(int(entries[0]), int(entries[-1]) + 1) if len(entries) else slice(0, 0)


def _reach(positions: Tensor, lowest: Tensor, highest: Tensor, window: int | None) -> tuple[slice, slice]:
    """The slots some query may see, and among those the ones that not every query of every head sees.

    positions [B,R] of the queries; lowest, highest [B,T] over the KV heads of a slot's positions. Right for any order
    of slots; short when they ascend.
    """
    last = positions.amax(-1, keepdim=True)
    first = positions.masked_fill(positions < 0, NOWHERE).amin(-1, keepdim=True)
    some, every = (highest >= 0) & (lowest <= last), (lowest >= 0) & (highest <= first)
    if window is not None:
        some &= highest > first - window
        every &= lowest > last - window
    reached = _extent(some.any(0))
    return reached, _extent(~every.all(0)[reached])


class _Kept(threading.local):
    buffer: Tensor | None = None


_kept = _Kept()


def _workspace(like: Tensor, size: int) -> Tensor:
    """An uninitialised tensor [size] of the dtype and device of `like`, on a CPU the same one again and again.

    A CPU's allocator may give memory back to the system after every layer, and page faults then cost as much as the
    sums. What is kept is LOGITS_AT_ONCE numbers per thread at most.
    """
    if like.device.type != "cpu" or size > LOGITS_AT_ONCE:
        return like.new_empty(size)
    if _kept.buffer is None or _kept.buffer.dtype != like.dtype or len(_kept.buffer) < size:
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            _kept.buffer = torch.empty(size, dtype=like.dtype)
    return _kept.buffer


class Sight(NamedTuple):
    """What the queries of a block may see: slots `reached` by some; among these, `partial` are not seen by all of them.

    hidden: which of the partial slots a query does not see, broadcast over [B,H_kv,G,R,P]. padding [B,R]: queries that
    are none, or see nothing perhaps; None where every query sees something.
    """

    reached: slice
    partial: slice
    hidden: Tensor
    padding: Tensor | None


def _sights(
    query_positions: Tensor, key_positions: Tensor, at_once: int, window: int | None
) -> Iterator[tuple[slice, Sight]]:
    """Rows [start, end) of `at_once` queries each and what they may see; blocks that see nothing are left out."""
    new, slots = query_positions.shape[1], key_positions.shape[2]
    before = slots - new
    if window is None and before >= 0 and _in_order(query_positions, before) and _in_order(key_positions, 0):
        upper = torch.ones(at_once, at_once, dtype=torch.bool, device=key_positions.device).triu()
        for start in range(0, new, at_once):
            end = min(start + at_once, new)
            hidden = upper[: end - start, : end - start - 1]
            yield (
                slice(start, end),
                Sight(slice(0, before + end), slice(before + start + 1, before + end), hidden, None),
            )
        return
    lowest, highest = key_positions.amin(1), key_positions.amax(1)
    for start in range(0, new, at_once):
        rows = slice(start, min(start + at_once, new))
        positions = query_positions[:, rows]
        reached, partial = _reach(positions, lowest, highest, window)
        if reached.stop > 0:
            seen = visible(positions, key_positions[..., reached][..., partial], window)
            yield rows, Sight(reached, partial, ~seen[:, :, None], positions < 0)


def _in_order(positions: Tensor, first: int) -> bool:
    """Whether positions [...,T] are first, first + 1, ... in every row."""
    expected = torch.arange(first, first + positions.shape[-1], device=positions.device)
    return bool((positions == expected).all())


def _all_small(queries: Tensor, transposed: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether no logit (base 2) can be beyond NO_SHIFT on either side, by the lengths of the vectors."""
    if sinks is not None and not bool(sinks.abs().amax() * LOG2E <= NO_SHIFT):
        return False
    if softcap is not None:
        return softcap * LOG2E <= NO_SHIFT
    longest = torch.linalg.vector_norm(widen(queries), dim=-1).amax() * transposed.norm(dim=-2).amax()
    return bool(longest * abs(scale) <= NO_SHIFT)  # not so if there is no number among them


class Attended(NamedTuple):
    """Values [B,H_kv,T,D'] and the attention output over them, [B,H_q,M,D']: filled in while the rows are at hand."""

    values: Tensor
    out: Tensor

    def take_in(self, rows: slice, reached: slice, weights: Tensor, inverse: Tensor) -> None:
        """One block of rows, as `softmax_blocks` yields it."""
        block = weights.flatten(2, 3) @ widen(self.values[:, :, reached])
        block = block.view(*inverse.shape, -1).mul_(inverse[..., None])
        self.out[:, :, rows] = block.flatten(1, 2)


def softmax_blocks(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    attended: Attended | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Softmax rows of some queries at a time; arguments as in `column_sums`, float64 where an input is float64.

    Yields the slots S that these R queries may see, weights [B,H_kv,G,R,S], and what each row is still to be multiplied
    by, [B,H_kv,G,R] (0 for padding). The weights lie in one buffer of O(T), which the next block overwrites.
    """
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    transposed = widen(keys).transpose(-1, -2)
    scale = scaling * LOG2E if softcap is None else scaling / softcap
    on_cpu = queries.device.type == "cpu"
    most, longest = (LOGITS_AT_ONCE, QUERIES_AT_ONCE) if on_cpu else (LOGITS_AT_ONCE_GPU, new)
    at_once = min(new, longest, max(FEW_QUERIES, most // (batch * query_heads * slots)))
    buffer = _workspace(transposed, batch * query_heads * at_once * slots)
    small = bias is None and _all_small(queries, transposed, scale, softcap, sinks)
    taken = None if sinks is None else widen(sinks).view(len(sinks), heads, -1, 1, 1).to(transposed.dtype) * LOG2E
    for rows, sight in _sights(query_positions, key_positions, at_once, sliding_window):
        shape = batch, heads, query_heads // heads, rows.stop - rows.start, sight.reached.stop - sight.reached.start
        logits = buffer[: math.prod(shape)].view(shape)
        block = widen(queries[:, :, rows]) * scale
        if sight.padding is not None:
            block.masked_fill_(sight.padding[:, None, :, None], 0.0)
        torch.matmul(block.reshape(batch, heads, -1, dim), transposed[..., sight.reached], out=logits.flatten(2, 3))
        if softcap is not None:
            logits.tanh_().mul_(softcap * LOG2E)
        if bias is not None:
            logits.add_(bias[:, :, None, None, sight.reached], alpha=LOG2E)
        logits[..., sight.partial].masked_fill_(sight.hidden, -torch.inf)
        top = None
        if not small:
            top = logits.amax(-1, keepdim=True) if taken is None else logits.amax(-1, keepdim=True).maximum(taken)
            logits.sub_(top.masked_fill_(top == -torch.inf, 0.0))
        weights = logits.exp2_()
        sums = weights.sum(-1)
        if taken is not None:
            sums += (taken if top is None else taken - top).exp2().squeeze(-1)
        if sight.padding is not None:
            sums.masked_fill_((sums == 0) | sight.padding[:, None, None], torch.inf)
        inverse = sums.reciprocal_()
        if attended is not None:
            attended.take_in(rows, sight.reached, weights, inverse)
        yield sight.reached, weights, inverse

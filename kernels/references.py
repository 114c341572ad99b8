"""Attention in PyTorch: the definitions that kernels are tested against, and the code for CPUs.

Rows of a few queries, softmax rows of a prompt in blocks of O(T) memory, one decoding step over slots or segments.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries of a call, R of a block, T slots, S slots
that a block sees, N flat slots of all segments, D head dim of queries and keys, D_v of values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.devices import numbers_at_once, on_host

LOG2E = math.log2(math.e)
FAR = 2.0**100  # so far below other logits that its exponential is exactly 0, even for a distance of one token
NEVER = 2**24  # an empty slot's position: the first whole number that float32 cannot distinguish from the next
NOWHERE = 2**30  # a position later than every query
FEW_QUERIES = 8  # up to this size, rows cost less than the administration of blocks
LOGITS_AT_ONCE = 2**22  # CPU: 16 MiB of float32; smaller blocks start threads too often, larger ones exceed the cache
QUERIES_AT_ONCE = 128  # CPU: a block extends to its last query, so that large blocks compute masked logits
NO_SHIFT = 100.0  # smaller logits (base 2, absolute) need no row maximum: float32 can represent the sum of their powers


class Attention(NamedTuple):
    """out [B,H_q,M,D_v] in the dtype of the values; log_sum_exp [B,H_q,M] float32; weights [B,H_kv,G,M,T] or None.

    log_sum_exp is the natural logarithm of the sum that divides the weights, including the sink. A query that sees
    nothing has output 0 and weights 0; its log_sum_exp is the logit of its sink, or -inf without one.
    """

    out: Tensor
    log_sum_exp: Tensor
    weights: Tensor | None = None


class NewTokens(NamedTuple):
    """Tokens that are appended to flat storage before attention: keys, values [B,H_kv,1,...] into slots [B,H_kv],
    int64 and contiguous, relative to the starts of their segments, each inside its segment."""

    keys: Tensor
    values: Tensor
    slots: Tensor


def widen(x: Tensor) -> Tensor:
    """x in float32, or in float64 for a float64 model: the dtypes of statistics."""
    return x if x.dtype == torch.float64 else x.float()


def visible(query_positions: Tensor, key_positions: Tensor, sliding_window: int | None = None) -> Tensor:
    """The slots that each query may read: stored tokens, not later than the query, inside the model's sliding window.

    query_positions [B,M] and key_positions [B,H,T] are original positions, -1 = padding or empty slot.
    Returns bool [B,H,M,T]. Causality compares original positions, never slots.
    """
    queries, keys = query_positions[:, None, :, None], key_positions[:, :, None, :]
    seen = (keys >= 0) & (keys <= queries)
    if sliding_window is not None:
        seen &= keys > queries - sliding_window
    return seen


def attention_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Scaled, soft-capped logits in float32, before any mask: [B,H_q,M,D] x [B,H_kv,T,D] -> [B,H_kv,G,M,T].

    bias [B,H_kv,T] is added to every query's logit of a slot, after the soft cap.
    """
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    rows = widen(queries).reshape(batch * heads, query_heads // heads * new, dim)
    columns = widen(keys).reshape(batch * heads, slots, dim).transpose(1, 2)
    logits = torch.baddbmm(rows.new_empty(1), rows, columns, beta=0, alpha=scaling)  # one launch, the scaling included
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.view(batch, heads, query_heads // heads, new, -1)
    return logits if bias is None else logits + bias[:, :, None, None].to(logits.dtype)


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """SDPA with a group's query heads as rows of their KV head, so that keys and values are never repeated.

    seen [B,H_kv or 1,M,T], or [...,G*M,T] for all heads of a group: None if every query sees every slot.
    """
    batch, query_heads, new, dim = queries.shape
    heads = keys.shape[1]
    rows = queries.reshape(batch, heads, query_heads // heads * new, dim)
    mask = seen if seen is None or seen.shape[2] == rows.shape[2] else seen.repeat(1, 1, query_heads // heads, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(batch, query_heads, new, values.shape[-1])  # on a GPU it may be strided


def weigh(rows: Tensor, values: Tensor) -> Tensor:
    """Attention output [B,H_q,M,D] of weights [B,H_kv,G,M,T] float32 over values [B,H_kv,T,D]."""
    batch, heads, group, new, slots = rows.shape
    weights = rows.view(batch * heads, group * new, slots).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(batch, heads * group, new, -1)


def sink_factor(log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """The share of probability that attention sinks leave to rows with this (natural) log-sum-exp.

    sinks: logits of the sinks, broadcastable. Multiply weights and output of a row by the result,
    exp(lse) / (exp(lse) + exp(sink)). Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3; learnt in gpt-oss.
    """
    return torch.sigmoid(log_sum_exp - sinks.to(log_sum_exp.dtype))


def rows_and_sight(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scaling: float,
    softcap: float | None = None, sliding_window: int | None = None, packed: bool = False, sighted: bool = False,
    sinks: Tensor | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Softmax rows [B,H_kv,G,M,T] float32, and [B,H_kv,M]: 1 for every query that attends to a slot, else 0.

    Arguments as in `attention_rows`; the row of a query that attends to no slot is undefined. packed: no slot is empty.
    sighted: every query attends to a slot; None is then returned instead of ones. sinks [B or 1,H_q], or [B,H_q,M]: see
    `sink_factor`; a sink has no slot. bias [B,H_kv,T]: see `attention_logits`.
    """
    logits = attention_logits(queries, keys, scaling, softcap, bias).detach()  # scores of evictions have no gradient
    return softmax_rows(logits, query_positions, key_positions, sliding_window, packed, sighted, sinks)


def softmax_rows(
    logits: Tensor, query_positions: Tensor, key_positions: Tensor, sliding_window: int | None = None,
    packed: bool = False, sighted: bool = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The softmax of `attention_logits`, in place. Other arguments and result as in `rows_and_sight`."""
    stored = key_positions if packed else key_positions.masked_fill(key_positions < 0, NEVER)
    age = query_positions.to(logits.dtype)[:, None, :, None] - stored.to(logits.dtype)[:, :, None]  # [B,H_kv,M,T]
    # A penalty for invisible slots instead of a mask: filling under a mask costs more than the softmax on a CPU.
    if sliding_window is None:
        hidden = age.clamp_(max=0.0)
    else:
        hidden = (sliding_window - 1 - age).clamp_(max=0.0) + age.clamp(max=0.0)
    logits.add_(hidden[:, :, None], alpha=FAR)
    left = None if sinks is None else sink_factor(logits.logsumexp(-1), sinks.view(len(sinks), *logits.shape[1:3], -1))
    rows = torch.softmax(logits, -1, out=logits)  # in place: half the memory
    if left is not None:
        rows.mul_(left[..., None])
    return rows, None if sighted else (hidden.amax(-1) == 0.0).to(logits.dtype)


def attention_rows(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax rows over the stored keys, [B,H_kv,G,M,T] float32; for small M, because all rows are built.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], positions as in `visible`. A query at position -1 (padding), or one that
    sees nothing, gives a row of zeros; empty slots get weight 0. sinks [B or 1,H_q]: rows then sum to less than 1.
    """
    call = queries, keys, query_positions, key_positions, scaling, softcap, sliding_window
    rows, sight = rows_and_sight(*call, sinks=sinks, bias=bias)
    assert sight is not None
    return rows.mul_(sight[:, :, None, :, None])


def _extent(flags: Tensor) -> slice:
    """The shortest range that holds every true entry of flags [T]."""
    entries = flags.nonzero()
    return slice(int(entries[0]), int(entries[-1]) + 1) if len(entries) else slice(0, 0)


def _reach(positions: Tensor, lowest: Tensor, highest: Tensor, window: int | None) -> tuple[slice, slice]:
    """The range of slots that some query may see, and within it the range that not every query of every head sees.

    positions [B,R] of the queries; lowest, highest [B,T] over the KV heads of a slot's positions. Correct for any
    order of slots; the ranges are short if positions ascend.
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
    """An uninitialised tensor [size] of the dtype and device of `like`; on a CPU, a buffer that is used again.

    A CPU's allocator may return memory to the system after every layer, and page faults then cost as much as the
    sums. A buffer has at most LOGITS_AT_ONCE numbers per thread.
    """
    if not on_host(like) or size > LOGITS_AT_ONCE:
        return like.new_empty(size)
    if _kept.buffer is None or _kept.buffer.dtype != like.dtype or len(_kept.buffer) < size:
        with torch.inference_mode(False):  # otherwise it could not be written outside of inference mode
            _kept.buffer = torch.empty(size, dtype=like.dtype)
    return _kept.buffer


class Sight(NamedTuple):
    """The slots of a block of queries: `reached` by some of them; `partial` is the part that some do not see.

    hidden: the partial slots that a query does not see, broadcastable to [B,H_kv,G,R,P]. padding [B,R]: queries that
    are padding or may see nothing; None if every query sees a slot.
    """

    reached: slice
    partial: slice
    hidden: Tensor
    padding: Tensor | None


def _sights(
    query_positions: Tensor, key_positions: Tensor, at_once: int, window: int | None
) -> Iterator[tuple[slice, Sight]]:
    """Rows [start, end) of `at_once` queries each and their slots; blocks without slots are left out."""
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
    """Whether the norms of the vectors bound all logits (base 2) by NO_SHIFT in absolute value."""
    if sinks is not None and not bool(sinks.abs().amax() * LOG2E <= NO_SHIFT):
        return False
    if softcap is not None:
        return softcap * LOG2E <= NO_SHIFT
    longest = torch.linalg.vector_norm(widen(queries), dim=-1).amax() * transposed.norm(dim=-2).amax()
    return bool(longest * abs(scale) <= NO_SHIFT)  # false if a norm is NaN


class Attended(NamedTuple):
    """Values [B,H_kv,T,D'] and the attention output [B,H_q,M,D'], which is computed from the same rows."""

    values: Tensor
    out: Tensor

    def take_in(self, rows: slice, reached: slice, weights: Tensor, inverse: Tensor) -> None:
        """One block of rows, as `softmax_blocks` yields it."""
        block = weights.flatten(2, 3) @ widen(self.values[:, :, reached])
        block = block.view(*inverse.shape, -1).mul_(inverse[..., None])
        self.out[:, :, rows] = block.flatten(1, 2)


def softmax_blocks(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scaling: float,
    softcap: float | None = None, sliding_window: int | None = None, attended: Attended | None = None,
    sinks: Tensor | None = None, bias: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """Softmax rows of some queries at a time; arguments as in `column_sums`, float64 where an input is float64.

    Yields the slots S that these R queries may see, weights [B,H_kv,G,R,S], and a factor for each row, [B,H_kv,G,R]
    (0 for padding), which is not yet applied. The weights are in a buffer of O(T) that the next block overwrites.
    """
    batch, query_heads, new, dim = queries.shape
    heads, slots = keys.shape[1:3]
    transposed = widen(keys).transpose(-1, -2)
    scale = scaling * LOG2E if softcap is None else scaling / softcap
    most, longest = (numbers_at_once(queries, number) for number in (LOGITS_AT_ONCE, QUERIES_AT_ONCE))
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


def append(flat: Mapping[str, Tensor], tokens: Mapping[str, Tensor], starts: Tensor, slots: Tensor) -> None:
    """Write one token of every sequence and KV head at its own slot of flat storage, in place.

    flat: storage [N,...] by name; tokens [B,H,1,...] by name. starts, slots [B,H] integers: the token goes to flat slot
    starts + slots; no two go to the same one.
    """
    where = (starts + slots).flatten()
    for name, x in tokens.items():
        flat[name].index_copy_(0, where, x.to(flat[name].dtype).flatten(0, 2))


def decode_attention_ref(
    queries: Tensor, keys: Tensor, values: Tensor, query_positions: Tensor | None, key_positions: Tensor | None,
    scaling: float, softcap: float | None = None, sliding_window: int | None = None, sinks: Tensor | None = None,
    packed: bool = False, weights: bool = False, sums: Tensor | None = None, bias: Tensor | None = None,
) -> Attention:  # fmt: skip
    """The definition: all rows at once in float32. Arguments and result as in `decode_attention`."""
    logits = attention_logits(queries, keys, scaling, softcap, bias)
    if not packed:
        assert query_positions is not None
        assert key_positions is not None
        seen = visible(query_positions, key_positions, sliding_window)  # [B,H_kv,M,T]
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        values = values.masked_fill((key_positions < 0)[..., None], 0.0)  # an empty slot has weight 0
    all_logits = logits
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        all_logits = torch.cat([logits, sink], dim=-1)
    log_sum_exp = all_logits.logsumexp(-1)
    rows = (logits - log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)[..., None]).exp()
    if sums is not None:
        drawn = rows.sum(3).transpose(-1, -2)  # [B,H_kv,T,G]
        sums += drawn if sums.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)
    out = (rows @ widen(values)[:, :, None]).flatten(1, 2).to(values.dtype)
    return Attention(out, log_sum_exp.flatten(1, 2), rows if weights else None)


def decode_attention_flat_ref(
    queries: Tensor, keys: Tensor, values: Tensor, query_positions: Tensor, key_positions: Tensor, starts: Tensor,
    counts: Tensor, most: int, scaling: float, softcap: float | None = None, sliding_window: int | None = None,
    sinks: Tensor | None = None, weights: bool = False, sums: Tensor | None = None,
    new_tokens: NewTokens | None = None, bias: Tensor | None = None,
) -> Attention:  # fmt: skip
    """The definition: segments padded to the longest. Arguments and result as in `decode_attention_flat`."""
    if new_tokens is not None:
        new = {"keys": new_tokens.keys, "values": new_tokens.values}
        append({"keys": keys, "values": values}, new, starts, new_tokens.slots)
    steps = torch.arange(most, device=counts.device)
    there = steps < counts[..., None]  # [B,H_kv,T]
    slots = (starts[..., None] + steps).masked_fill(~there, 0)
    positions = key_positions[slots].masked_fill(~there, -1)
    own = None if sums is None else sums.new_zeros(*slots.shape, sums.shape[-1])  # 0 beyond a segment's end
    found = decode_attention_ref(
        queries, keys[slots], values[slots], query_positions, positions, scaling, softcap, sliding_window, sinks,
        weights=weights, sums=own, bias=None if bias is None else bias[slots],
    )  # fmt: skip
    if sums is not None and own is not None:
        sums.index_put_((slots,), own, accumulate=True)
    return found

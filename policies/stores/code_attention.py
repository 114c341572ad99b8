"""Attention over tokens that are stored as codes, which are dequantised a block at a time.

Only the logits of all tokens are held in full precision. A block fits the cache of a CPU core, which makes attention
several times as fast as with dequantised keys and values of all tokens.

Shapes: B batch, H_q query heads, H KV heads, r query rows per KV head, M queries, C tokens, E exact tokens, D head dim.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.devices import numbers_at_once
from kvbench.kernels.references import softmax_rows, widen
from kvbench.policies.observation import AttentionParams


class Outliers(NamedTuple):
    """Exact keys [B,H,E,D] and values [B,H,E,D_v] that replace the tokens at slots [B,H,E] int32; -1 = empty."""

    keys: Tensor
    values: Tensor
    slots: Tensor


AT_ONCE = 2**12  # slots, over all KV heads, on a CPU: 2 MB of float32 for heads of 128 numbers


def blocks(tokens: int, like: Tensor, unit: int) -> Iterator[slice]:
    """Tokens that are dequantised at once for queries like [B,H,...]: multiples of `unit`, all at once on a GPU."""
    size = max(numbers_at_once(like, AT_ONCE) // like.shape[1] // unit, 1) * unit
    return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))


def scores_by_block(rows: Tensor, tokens: int, block: Callable[[slice], Tensor], unit: int = 1) -> Tensor:
    """Products [B,H,r,C] of query rows [B,H,r,D] with C tokens; block: some of them, dequantised, [B,H,m,n,D]."""
    found = []
    for some in blocks(tokens, rows, unit):
        products = rows[:, :, None] @ block(some).to(rows.dtype).mT  # [B,H,m,r,n]
        found.append(products.transpose(2, 3).flatten(3))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def weighted_by_block(weights: Tensor, block: Callable[[slice], Tensor], unit: int = 1) -> Tensor:
    """Sums [B,H,r,D] of C tokens with weights [B,H,r,C]; block: some of them, dequantised, [B,H,m,n,D]."""
    sums = []
    for some in blocks(weights.shape[3], weights, unit):
        x = block(some).to(weights.dtype)
        products = weights[..., some].unflatten(3, x.shape[2:4]).transpose(2, 3) @ x  # [B,H,m,r,D]
        sums.append(products.sum(2))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def cover(x: Tensor, exact: Tensor, slots: Tensor) -> Tensor:
    """Tokens x [B,H,C,D] with exact ones [B,H,E,D] at slots [B,H,E]; -1: nowhere."""
    count = x.shape[2]
    places = slots.long().masked_fill(slots < 0, count)[..., None].expand(-1, -1, -1, x.shape[-1])
    return F.pad(x, (0, 0, 0, 1)).scatter_(2, places, exact.to(x.dtype))[:, :, :count]


def attend_to_codes(
    queries: Tensor, positions: Tensor, how: AttentionParams, scores: Callable[[Tensor], Tensor],
    weighted: Callable[[Tensor], Tensor], places: Tensor, exact: Outliers | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [B,H_q,M,D] of queries at positions [B,M], and its weights [B,H,r,C], in float32 (or float64).

    scores: products [B,H,r,C] of rows [B,H,r,D] with the keys. weighted: sums [B,H,r,D] of the values with weights
    [B,H,r,C]. places [B,H,C]: positions of the tokens. exact: tokens that replace some of the codes.
    """
    batch, heads, count = places.shape
    rows = widen(queries).reshape(batch, heads, -1, queries.shape[3])
    logits, slots = scores(rows), None
    if exact is not None:  # a column C is added for exact tokens that do not exist
        slots = exact.slots.long().masked_fill(exact.slots < 0, count)[:, :, None].expand(-1, -1, rows.shape[2], -1)
        logits = F.pad(logits, (0, 1)).scatter_(-1, slots, rows @ exact.keys.to(rows.dtype).mT)[..., :count]
    logits = (logits * how.scaling).view(batch, heads, -1, queries.shape[2], count)
    if how.softcap is not None:
        logits = how.softcap * torch.tanh(logits / how.softcap)
    found, sight = softmax_rows(logits, positions, places, how.sliding_window, sinks=how.sinks)
    assert sight is not None
    weights = found.mul_(sight[:, :, None, :, None]).flatten(2, 3)
    if exact is None or slots is None:
        out = weighted(weights)
    else:
        padded = F.pad(weights, (0, 1))
        out = padded.gather(-1, slots) @ exact.values.to(rows.dtype)
        out += weighted(padded.scatter_(-1, slots, 0.0)[..., :count])
    return out.view(*queries.shape[:3], -1), weights

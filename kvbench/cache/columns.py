"""The columns of a call: which are tokens, and whether mask and positions continue those of earlier calls.

Shapes: B batch, M new tokens of a call, N tokens seen by its end, padding included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """What the model passes about the tokens of a call: mask [B,N] bool (or [B,M]) of real tokens, None if all are;
    position_ids [B or 1,M], None if the model does not pass them on.
    """

    mask: Tensor | None
    position_ids: Tensor | None


def real_columns(columns: Columns, seen: Sequence[int], batch: int, new: int, shifts: dict[int, int]) -> Tensor | None:
    """The new tokens that are no padding, bool [B,M]; None if all are.

    seen: tokens of every sequence before the call, empty before the first. shifts: of each sequence, its positions in
    the model minus its own (models may count padding); set by its first call, and the same from then on.
    ValueError for padding on the right, another number of sequences, and a mask or positions that contradict earlier
    calls: the model would rotate new tokens as if evicted ones had never been there.
    """
    if seen and len(seen) != batch:
        raise ValueError(
            f"this KVCache has {len(seen)} sequences, but the call brings {batch}: make a cache for every batch, "
            "KVCache(model.config, policy), or call cache.reset() first"
        )
    mask, real = columns.mask, None
    before, counts = list(seen) or [0] * batch, [new] * batch
    if mask is not None:
        now = mask[:, -new:]
        past, counts, holes = torch.stack([mask.sum(-1) - now.sum(-1), now.sum(-1), _holes(now)]).tolist()
        if any(holes):
            raise ValueError(
                "attention_mask must mark padding on the left only, so that every prompt ends in the last column: "
                'tokenize with padding_side="left"'
            )
        for row, (marked, held) in enumerate(zip(past, before, strict=True)):
            if mask.shape[1] > new and marked != held:
                raise ValueError(
                    f"attention_mask marks {marked} earlier tokens of sequence {row}, but the cache has seen {held}: "
                    "pass the mask of the earlier calls with new columns behind it, or no mask without padding"
                )
        real = None if min(counts) == new else now
    places = columns.position_ids
    if places is not None and places.dim() == 2 and places.shape[1] == new and not places.is_meta:
        _check_positions(places.expand(batch, -1), real, before, counts, shifts)
    return real


def _holes(now: Tensor) -> Tensor:
    """Whether padding follows a token, [B] of 0 and 1."""
    return (now[:, :-1] & ~now[:, 1:]).any(-1).long()


def _check_positions(
    places: Tensor, real: Tensor | None, seen: Sequence[int], counts: Sequence[int], shifts: dict[int, int]
) -> None:
    """ValueError unless the positions [B,M] of every sequence count on by one, also from those of earlier calls."""
    own = torch.arange(places.shape[1], device=places.device) if real is None else real.long().cumsum(-1) - 1
    shift = places - (own + places.new_tensor(seen)[:, None])
    if real is not None:
        shift = torch.where(real, shift, shift[:, -1:])
    for row, (low, high) in enumerate(torch.stack(shift.aminmax(dim=-1), dim=-1).tolist()):
        if counts[row] and (low, high) != (shifts.setdefault(row, low),) * 2:
            found = low if low != shifts[row] else high
            raise ValueError(
                f"position_ids of sequence {row} do not continue those of its earlier tokens: got "
                f"{found + seen[row]} where {shifts[row] + seen[row]} follows. Positions count every token seen, "
                "evicted ones included: leave position_ids out, give attention_mask a column for each of them, and "
                "do not set use_cache=False"
            )

"""Functions on tensors of slots: take some slots, stack several tensors, copy a view.

Shapes: B sequences, H KV heads, C slots, n slots of each KV head, D numbers of a slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MANY = 2**14  # the least number of elements that are copied by rows, which is faster
GROWTH = 64  # slots added at once while decoding grows: the copy costs about 1/64 of what attention reads anyway


def spread_index(slots: Tensor, x: Tensor) -> Tensor:
    """slots [B,H,n] as an index into dimension 2 of x [B,H,C] or [B,H,C,D]."""
    return slots if x.dim() == 3 else slots.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])


def take(x: Tensor, slots: Tensor) -> Tensor:
    """x [B,H,C,...] at slots [B,H,n] -> [B,H,n,...]."""
    rows = _rows(x) if x.dim() == 4 and slots.numel() * x.shape[3] >= MANY else None
    if rows is None:
        return x.gather(2, spread_index(slots, x))
    sequence, head, slot = (stride // x.shape[3] for stride in x.stride()[:3])
    first = torch.arange(x.shape[0], device=x.device)[:, None] * sequence
    first = first + torch.arange(x.shape[1], device=x.device) * head
    places = slots * slot + first[..., None]
    return rows.index_select(0, places.flatten()).view(*slots.shape, x.shape[3])


def _rows(x: Tensor) -> Tensor | None:
    """The memory of x [B,H,C,D] as rows of D numbers; None if x has no such rows.

    Copying rows on a CPU is up to four times as fast as `gather`, which copies single numbers.
    """
    dim, strides = x.shape[3], x.stride()
    if x.is_cuda or x.requires_grad or strides[3] != 1 or any(stride % dim for stride in strides[:3]):
        return None
    last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides, strict=False))
    return x.as_strided((last // dim + 1, dim), (dim, 1))


def padded(parts: Sequence[Tensor], fill: float = 0, dim: int = 2) -> Tensor:
    """Tensors concatenated in dimension 0 and padded in `dim` with `fill`; a single tensor is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    most = max(part.shape[dim] for part in parts)
    if all(part.shape[dim] == most for part in parts):
        return torch.cat(list(parts))
    counts, shape = [len(part) for part in parts], list(parts[0].shape)
    shape[0], shape[dim] = sum(counts), most
    whole = parts[0].new_full(shape, fill)
    for part, rows in zip(parts, whole.split(counts), strict=True):
        rows.narrow(dim, 0, part.shape[dim]).copy_(part)
    return whole


def rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [1,...] of equal shapes as rows of one: a view if they are consecutive rows of a tensor, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size, whole = first.element_size(), first.untyped_storage().data_ptr()
    gap = parts[1].data_ptr() - first.data_ptr()
    for row, part in enumerate(parts):
        there = part.data_ptr() == first.data_ptr() + row * gap and part.untyped_storage().data_ptr() == whole
        if not there or part.stride() != first.stride() or gap < first[0].numel() * size:
            return torch.cat(list(parts))
    return first.as_strided((len(parts), *first.shape[1:]), (gap // size, *first.stride()[1:]))


def writable(x: Tensor) -> bool:
    """Whether a tensor may be changed in place: it has no gradient, and is not one of inference mode outside of it."""
    return not x.requires_grad and (not x.is_inference() or torch.is_inference_mode_enabled())


def copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, with one launch for those of a dtype."""
    equal: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        equal.setdefault(pair[0].dtype, []).append(pair)
    for some in equal.values():
        torch._foreach_copy_([into for into, _ in some], [x for _, x in some])


def owned(x: Tensor) -> Tensor:
    """x, copied if it is a view of a larger tensor, which it would keep in memory (a fused projection, a batch)."""
    whole = x.untyped_storage().nbytes() <= x.nbytes
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def extremes(mask: Tensor, count: int | None) -> tuple[int, int]:
    """The largest and the smallest number of slots of mask [B,H,C] per KV head; count: of every head, if known."""
    if count is not None and not mask.is_cpu:  # the host would wait for a GPU, for a number that it has already
        return count, count
    numbers = mask.sum(-1).flatten().tolist()
    assert count is None or set(numbers) == {count}, "the count differs from the mask"
    return max(numbers), min(numbers)


def partitioned(mask: Tensor) -> Tensor:
    """All slots [...,C]: those of mask bool [...,C] in order, then the others, the last one first; without a sort."""
    slots, ends = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask), mask.cumsum(-1)
    places = torch.where(mask, ends, mask.shape[-1] - slots + ends) - 1
    return torch.empty_like(places).scatter_(-1, places, slots)


def slots_in_order(positions: Tensor, mask: Tensor, most: int, ascending: bool, even: bool = True) -> Tensor:
    """The first `most` slots of mask [B,H,C] in order of positions [B,H,C].

    ascending: they are in this order. even: every head has `most`; else, other slots follow those of shorter ones.
    """
    if ascending and even and mask.is_cpu:  # on a GPU, the host would wait for `nonzero`
        return mask.nonzero()[:, -1].view(*mask.shape[:2], most)
    if ascending:
        return partitioned(mask)[..., :most]
    return positions.masked_fill(~mask, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)[..., :most]

"""Functions on tensors of slots: take some slots, stack several tensors, copy a view.

Shapes: B sequences, H KV heads, C slots, n slots of each KV head, D numbers of a slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH = 64  # slots added at once while decoding grows: the copy costs about 1/64 of what attention reads anyway


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

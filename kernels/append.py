# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""The newest token of every sequence, written into flat storage: keys, values, positions and statistics in one launch.

Shapes: B batch, H KV heads, N flat slots of all of them, W numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.kernels.jit import at_head, jit, next_power_of_two, require_triton, tl, use_triton, view


def append_ref(flat: Mapping[str, Tensor], tokens: Mapping[str, Tensor], starts: Tensor, slots: Tensor) -> None:
    """The definition. Arguments as in `append`."""
    where = (starts + slots).flatten()
    for name, stored in flat.items():
        if name in tokens:
            stored.index_copy_(0, where, tokens[name].to(stored.dtype).flatten(0, 2))
        else:
            stored.index_fill_(0, where, 0)


@jit
def _append(
    starts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    columns: tl.tuple,
    H: tl.tensor,
    WIDTHS: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program: all columns of one KV head's token, of WIDTHS numbers, GIVEN or 0; BLOCKS: filled up.

    A column is flat storage and the tokens' own `View` [B,H,1,...].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(starts_ptr + row).to(tl.int64) + tl.load(slots_ptr + row)
    for i in tl.static_range(len(BLOCKS)):
        flat, tokens = columns[i]
        numbers = tl.arange(0, BLOCKS[i])
        token = tl.load(at_head(tokens, row, H) + numbers, mask=numbers < GIVEN[i], other=0)
        tl.store(flat + slot * WIDTHS[i] + numbers, token.to(flat.dtype.element_ty), mask=numbers < WIDTHS[i])


def append_triton(flat: Mapping[str, Tensor], tokens: Mapping[str, Tensor], starts: Tensor, slots: Tensor) -> None:
    """`append` in one launch. ValueError where Triton is missing. Under TRITON_INTERPRET=1 CPU tensors will do."""
    require_triton("append", starts.device)
    batch, heads = starts.shape
    assert all(x.is_contiguous() for x in flat.values()), "flat storage is in one piece"
    columns = []
    for name, stored in flat.items():
        token = tokens.get(name, starts.unsqueeze(-1))  # which is then not read
        token = token.contiguous() if token.dim() > 3 and token.stride(-1) != 1 else token
        columns.append((stored, view(token)))
    widths = tuple(x.shape[1:].numel() for x in flat.values())
    with torch.cuda.device_of(starts):
        _append[batch * heads,](
            starts.contiguous(), slots.contiguous(), tuple(columns), heads, WIDTHS=widths,
            GIVEN=tuple(width * (name in tokens) for name, width in zip(flat, widths, strict=True)),
            BLOCKS=tuple(map(next_power_of_two, widths)), num_warps=1, maxnreg=64,
        )  # fmt: skip


def append(flat: Mapping[str, Tensor], tokens: Mapping[str, Tensor], starts: Tensor, slots: Tensor) -> None:
    """Write one token of every sequence and KV head at its own slot, in place.

    flat: storage [N,...] by name, contiguous; tokens [B,H,1,...] by name, 0 where a name has none (statistics).
    starts, slots [B,H] integers: the token goes to flat slot starts + slots; no two go to one. CUDA: Triton, ValueError
    without it. CPU, float64: the reference.
    """
    write = append_triton if all(map(use_triton, flat.values())) else append_ref
    write(flat, tokens, starts, slots)

# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Slots of several layers, each with flat storage of its own, read or written in one launch.

Shapes: L layers, N flat slots of a layer, n slots asked of each layer, W numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.jit import jit, next_power_of_two, require_triton, tl, use_triton

SLOTS_A_PROGRAM = 16


class LayerRows:
    """Flat storage [N,W] of one dtype and width, layer by layer, and where in memory each of them begins."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.layers = list(layers)
        assert all(x.is_contiguous() and x.dtype == layers[0].dtype for x in layers), "rows lie one after another"
        self._addresses = torch.tensor([x.data_ptr() for x in layers], device=layers[0].device)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def _index(self, layers: tuple[int, ...]) -> Tensor:
        """These layers as a tensor [l], copied to the device once: a copy from the host makes a GPU wait."""
        if layers not in self._indices:
            self._indices[layers] = torch.tensor(layers, device=self._addresses.device)
        return self._indices[layers]

    def read(self, where: Tensor, layers: Sequence[int]) -> Tensor:
        """Slots where [l,n] of l of the layers: [l,n,W]."""
        if not use_triton(self.layers[0]):
            return torch.stack([self.layers[layer][own] for layer, own in zip(layers, where, strict=True)])
        found = self.layers[0].new_empty(*where.shape, self.layers[0].shape[1])
        self._move(where, found, layers, store=False)
        return found

    def write(self, where: Tensor, rows: Tensor, layers: Sequence[int]) -> None:
        """Put rows [l,n,W] into slots where [l,n] of l of the layers; no slot is named twice."""
        if use_triton(self.layers[0]):
            self._move(where, rows.to(self.layers[0].dtype).contiguous(), layers, store=True)
            return
        for layer, own, new in zip(layers, where, rows, strict=True):
            self.layers[layer].index_copy_(0, own, new.to(self.layers[layer].dtype))

    def _move(self, where: Tensor, rows: Tensor, layers: Sequence[int], store: bool) -> None:
        require_triton("layer_rows", rows.device)
        count, width = where.shape[1], rows.shape[2]
        grid = len(where), -(-count // SLOTS_A_PROGRAM)
        with torch.cuda.device_of(rows):
            _move[grid](
                self._addresses[self._index(tuple(layers))], where.contiguous(), rows, count, STORE=store, W=width,
                BLOCK_W=next_power_of_two(width), BLOCK_N=SLOTS_A_PROGRAM, num_warps=4,
            )  # fmt: skip


@jit
def _move(
    addresses_ptr: tl.tensor,
    where_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    count: tl.tensor,
    STORE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_N slots of a layer, copied from its storage to `rows` or, to STORE, back."""
    layer = tl.program_id(0).to(tl.int64)
    each = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    numbers = tl.arange(0, BLOCK_W)
    there = (each < count)[:, None] & (numbers < W)[None, :]
    stored = tl.load(addresses_ptr + layer).to(tl.pointer_type(rows_ptr.dtype.element_ty))
    slots = tl.load(where_ptr + layer * count + each, mask=each < count, other=0).to(tl.int64)
    inside = stored + slots[:, None] * W + numbers[None, :]
    outside = rows_ptr + (layer * count + each)[:, None] * W + numbers[None, :]
    if STORE:
        tl.store(inside, tl.load(outside, mask=there), mask=there)
    else:
        tl.store(outside, tl.load(inside, mask=there), mask=there)

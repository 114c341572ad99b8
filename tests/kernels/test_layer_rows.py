"""Slots of several layers in one launch: what indexing each layer by itself gives."""

from __future__ import annotations

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.layer_rows import LayerRows


def drawn(seed: int) -> dict[str, Tensor | list[Tensor]]:
    """Layers of sizes that only the seed knows, slots of the last two, and what to put there."""
    random = torch.Generator().manual_seed(seed)
    dtype, width = (torch.float32, torch.float16, torch.bfloat16)[seed % 3], (20, 64, 3)[seed % 3]
    layers = [torch.randn(n, width, generator=random).to(dtype) for n in (40, 27, 19)]
    where = torch.stack([torch.randperm(len(x), generator=random)[:18] for x in layers[1:]])
    return {"layers": layers, "where": where, "new": torch.randn(2, 18, width, generator=random).to(dtype)}


def moved(layers: list[Tensor], where: Tensor, new: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What lay in the slots, and all layers after the new rows were put there."""
    rows = LayerRows(layers)
    read = rows.read(where, (1, 2))
    rows.write(where, new, (1, 2))
    return read, layers


@pytest.mark.parametrize("seed", range(3))
def test_slots_are_read_and_written_where_each_layer_has_them(seed: int, interpret: Interpreter) -> None:
    call = drawn(seed)
    layers, where, new = (call[name] for name in ("layers", "where", "new"))
    assert isinstance(layers, list)
    expected = [layers[0], *(x.index_copy(0, own, put) for x, own, put in zip(layers[1:], where, new, strict=True))]
    lay = torch.stack([x[own] for x, own in zip(layers[1:], where, strict=True)])
    for got, after in (interpret(moved, **call), moved(**drawn(seed))):  # type: ignore[arg-type]
        assert torch.equal(got, lay)
        assert all(map(torch.equal, after, expected))

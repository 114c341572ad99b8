"""Launches of very many heads: layers that evict side by side are rows of one batch, 65,536 KV heads and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbench.kernels import compaction, decode_attention, nearest, selection, value_errors, window_statistics

SEQUENCES, HEADS, SLOTS, DIM = 8193, 8, 3, 2  # 65,544 KV heads: more than CUDA takes on any axis but the first
MOST = 65_535

keys = torch.zeros(1, 1, 1, DIM).expand(SEQUENCES, HEADS, SLOTS, -1)
row = torch.zeros(1, 1, 1).expand(SEQUENCES, HEADS, SLOTS)
positions = torch.arange(SLOTS, dtype=torch.int32).expand(SEQUENCES, HEADS, -1)
protected = torch.zeros(1, 1, 1, dtype=torch.bool).expand(SEQUENCES, HEADS, SLOTS)
one = torch.zeros(1, 1, 1, dtype=torch.int64).expand(SEQUENCES, HEADS, 1)
query, asked = keys[:, :, :1], torch.full((SEQUENCES, 1), SLOTS)
buffers = {"keys": keys, "values": keys, "positions": positions}
counts = torch.ones(SEQUENCES, HEADS, dtype=torch.int32)

LAUNCHES: dict[str, tuple[Any, Callable[[], object]]] = {
    "select": (selection, lambda: selection.select_triton(row, None, positions, protected, 2)),
    "victim": (selection, lambda: selection.victim_triton(row, None, positions, protected)),
    "kept_slots": (compaction, lambda: compaction.kept_slots_triton(protected, 1)),
    "compact": (compaction, lambda: compaction.compact_triton(buffers, one, counts, 1)),
    "merge_one": (nearest, lambda: nearest.merge_one_triton(keys, keys, positions, one, None, 0.5, False)),
    "value_errors": (value_errors, lambda: value_errors.value_errors_triton(row[:, :, None], keys, None, 1e-6)),
    "decode_attention": (
        decode_attention,
        lambda: decode_attention.decode_attention_triton(query, keys, keys, asked, positions, 1.0, splits=1),
    ),
    "window_statistics": (
        window_statistics,
        lambda: window_statistics.window_statistics_triton(query, keys, asked, positions, 1.0),
    ),
}


class Recorder:
    """Stands where a kernel stands: notes the grid and launches nothing."""

    def __init__(self, grids: list[tuple[int, ...]]) -> None:
        self._grids = grids

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self._grids.append(grid)
        return lambda *args, **how: None


@pytest.mark.parametrize("name", LAUNCHES)
def test_more_than_65535_heads_are_launched_on_the_axis_that_takes_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    module, launch = LAUNCHES[name]
    grids: list[tuple[int, ...]] = []
    launched = triton.runtime.KernelInterface  # compiled or interpreted, what has a grid
    for kernel in [kernel for kernel, x in vars(module).items() if isinstance(x, launched)]:
        monkeypatch.setattr(module, kernel, Recorder(grids))
    launch()
    assert grids
    assert all(grid[0] >= SEQUENCES * HEADS for grid in grids)
    assert all(size <= MOST for grid in grids for size in grid[1:])

"""Launches of very many heads: layers that evict side by side are rows of one batch, 65,536 KV heads and more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_launched import MODULES

from kvbench.kernels import (
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    merge_one,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    selection,
    value_errors,
    window_statistics,
)
from kvbench.kernels.packed import Packed, Side

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

lse = torch.zeros(1, 1, 1).expand(SEQUENCES, HEADS, SLOTS)
prompt = (keys, keys, positions[:, 0], positions, 1.0)


def codes(unit: int, tokens: int, per_token: bool) -> Side:
    """Zeros in 2-bit codes, with a tail of SLOTS tokens."""
    outer = (tokens, DIM // unit) if per_token else (tokens // unit, DIM)
    scale = torch.zeros(1, 1, *outer).expand(SEQUENCES, HEADS, *outer)
    words = torch.zeros(1, 1, *outer, -(-2 * unit // 32), dtype=torch.int32).expand(SEQUENCES, HEADS, *outer, -1)
    return Side(Packed(words, scale, scale, 2, unit, per_token), keys)


LAUNCHES: dict[str, Callable[[], object]] = {
    "select": lambda: selection.select_triton(row, None, positions, protected, 2),
    "victim": lambda: selection.victim_triton(row, None, positions, protected),
    "kept_slots": lambda: compaction.kept_slots_triton(protected, 1),
    "compact": lambda: compaction.compact_triton(buffers, one, counts, 1),
    "nearest": lambda: nearest.nearest_triton(keys, keys, protected),
    "merge_one": lambda: merge_one.merge_one_triton(keys, keys, positions, one, None, 0.5, False),
    "value_errors": lambda: value_errors.value_errors_triton(row[:, :, None], keys, None, 1e-6),
    "decode_attention": lambda: decode_attention.decode_attention_triton(
        query, keys, keys, asked, positions, 1.0, programs=1
    ),
    "quantised_attention": lambda: quantised_attention.quantised_attention_triton(
        query, asked, codes(128, 128, False), codes(DIM, 128, True), 1.0
    ),
    "quantise": lambda: quantise.quantise_triton(keys, DIM, True, 2, torch.float32),
    "prompt_attention": lambda: prompt_attention.prompt_attention_triton(keys, keys, keys, *prompt[2:]),
    "column_sums": lambda: column_sums.column_sums_triton(*prompt, log_sum_exp=lse),
    "attention_moments": lambda: attention_moments.attention_moments_triton(*prompt, log_sum_exp=lse),
    "window_statistics": lambda: window_statistics.window_statistics_triton(query, keys, asked, positions, 1.0),
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
    grids: list[tuple[int, ...]] = []
    launched = triton.runtime.KernelInterface  # compiled or interpreted, what has a grid
    for module in MODULES:
        for kernel in [kernel for kernel, x in vars(module).items() if isinstance(x, launched)]:
            monkeypatch.setattr(module, kernel, Recorder(grids))
    LAUNCHES[name]()
    assert grids
    assert all(grid[0] >= SEQUENCES * HEADS for grid in grids[name == "decode_attention" :])  # whose list has no axis
    assert all(size <= MOST for grid in grids for size in grid[1:])

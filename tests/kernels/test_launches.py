"""Every kernel at the main shapes, as its launcher asks for it on an A100, an H100 and a B200, compiled: no spills.

`python -m pytest tests/kernels -k compile -v` compiles these and all odd shapes, and prints a table of what came out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

import pytest
import torch
from kernel_launched import SIZES, Launch, compiled_launch, launches_on

from kvbench.kernels import (
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    decode_attention_flat,
    join_splits,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    quantised_groups,
    selection,
    value_errors,
    window_largest,
    window_statistics,
)
from kvbench.kernels.packed import Packed, Side

MODULES = (
    *(attention_moments, column_sums, compaction, decode_attention, join_splits, nearest, prompt_attention, quantise),
    *(quantised_attention, quantised_groups, selection, value_errors, window_largest, window_statistics),
)
H_KV, GROUP, SLOTS = 8, 4, 8192


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def places(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.int32)


class Shape:
    """Calls of every launcher for a layer of 8 KV heads of `dim` numbers, 4 query heads each, and 8,192 slots."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def slots(self) -> torch.Tensor:
        """As a model hands them over: heads beside each other."""
        return numbers(1, SLOTS, H_KV, self.dim).transpose(1, 2)

    def asking(self, queries: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys, both positions and the scaling."""
        asking = numbers(1, queries, H_KV * GROUP, self.dim).transpose(1, 2)
        return asking, self.slots(), numbers(1, queries, dtype=torch.int64), places(1, H_KV, SLOTS).long()

    def prompt_attention(self, aligned: bool) -> object:
        queries, keys, *positions = self.asking(SLOTS)
        call = queries, keys, self.slots(), *positions, 0.1
        return prompt_attention.prompt_attention_triton(*call, aligned=aligned)

    def sums(self, launcher: Callable[..., object], aligned: bool) -> object:
        lse = numbers(1, H_KV * GROUP, SLOTS, dtype=torch.float32)
        return launcher(*self.asking(SLOTS), 0.1, log_sum_exp=lse, aligned=aligned)

    def decode(self, packed: bool) -> object:
        queries, keys, *positions = self.asking(1)
        sums = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        call = queries, keys, self.slots(), *positions, 0.1
        return decode_attention.decode_attention_triton(*call, packed=packed, weights=True, sums=sums)

    def decode_flat(self) -> object:
        queries, _, asked, _ = self.asking(1)
        flat, where = numbers(H_KV * SLOTS, self.dim), numbers(1, H_KV, dtype=torch.int64)
        positions = places(H_KV * SLOTS)
        return decode_attention_flat.decode_attention_flat_triton(
            queries, flat, flat, asked, positions, where, where, SLOTS, 0.1, weights=True
        )

    def quantised(self, bits: int, outliers: int) -> object:
        def side(unit: int, tokens: int, channels: int, per_token: bool) -> Side:
            scale = numbers(1, H_KV, tokens, channels, dtype=torch.float16)
            words = places(1, H_KV, tokens, channels, unit * bits // 32)
            return Side(Packed(words, scale, scale, bits, unit, per_token), numbers(1, H_KV, 40, self.dim))

        unit = 256 // bits
        keys, values = side(unit, SLOTS // unit, self.dim, False), side(self.dim, SLOTS, 1, True)
        exact = (numbers(1, H_KV, outliers, self.dim) for _ in range(2))
        pool = quantised_attention.Outliers(*exact, places(1, H_KV, outliers)) if outliers else None
        queries, _, asked, _ = self.asking(1)
        return quantised_attention.quantised_attention_triton(queries, asked, keys, values, 0.1, outliers=pool)

    def value_errors(self, rows: int) -> object:
        scores = numbers(1, H_KV, rows, SLOTS, dtype=torch.float32)
        return value_errors.value_errors_triton(scores, self.slots(), numbers(1, H_KV, SLOTS, dtype=torch.bool), 1e-6)

    def chosen(self) -> tuple[torch.Tensor, ...]:
        scores = numbers(1, H_KV, SLOTS, dtype=torch.float32)
        return scores, scores, places(1, H_KV, SLOTS), numbers(1, H_KV, SLOTS, dtype=torch.bool)

    def compact(self) -> object:
        state = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        buffers = {"keys": self.slots(), "values": self.slots(), "positions": places(1, H_KV, SLOTS)}
        kept = numbers(1, H_KV, 1024, dtype=torch.int64), places(1, H_KV)
        return compaction.compact_triton({**buffers, "sums": state, "squares": state}, *kept, spare=1)

    def merge_one(self) -> object:
        victims, threshold = numbers(1, H_KV, 1, dtype=torch.int64), numbers(1, H_KV, dtype=torch.float32)
        return nearest.merge_one_triton(
            self.slots(), self.slots(), places(1, H_KV, SLOTS), victims, threshold, 0.7, False
        )

    def quantise(self, bits: int, per_token: bool) -> object:
        return quantise.quantise_triton(
            self.slots(), self.dim if per_token else 256 // bits, per_token, bits, torch.float16
        )


CALLS: dict[str, Callable[[Shape], object]] = {
    "prompt attention": lambda shape: shape.prompt_attention(True),
    "prompt attention by position": lambda shape: shape.prompt_attention(False),
    "column sums": lambda shape: shape.sums(column_sums.column_sums_triton, True),
    "column sums by position": lambda shape: shape.sums(column_sums.column_sums_triton, False),
    "moments": lambda shape: shape.sums(attention_moments.attention_moments_triton, True),
    "moments by position": lambda shape: shape.sums(attention_moments.attention_moments_triton, False),
    "window of 32": lambda shape: window_statistics.window_statistics_triton(*shape.asking(32), 0.1),
    "window of 32, largest head": lambda shape: window_largest.window_largest_triton(*shape.asking(32), 0.1),
    "decode attention": lambda shape: shape.decode(True),
    "decode attention by position": lambda shape: shape.decode(False),
    "decode attention, flat": lambda shape: shape.decode_flat(),
    "quantised attention, 2 bits": lambda shape: shape.quantised(2, 0),
    "quantised attention, 2 bits, outliers": lambda shape: shape.quantised(2, 35),
    "quantised attention, 4 bits": lambda shape: shape.quantised(4, 0),
    "value errors": lambda shape: shape.value_errors(1),
    "value errors, 4 rows": lambda shape: shape.value_errors(GROUP),
    "select": lambda shape: selection.select_triton(*shape.chosen(), 1024),
    "victim": lambda shape: selection.victim_triton(*shape.chosen()),
    "kept slots": lambda shape: compaction.kept_slots_triton(shape.chosen()[-1], 1024),
    "compact": lambda shape: shape.compact(),
    "nearest": lambda shape: nearest.nearest_triton(shape.slots(), shape.slots(), shape.chosen()[-1]),
    "merge one": lambda shape: shape.merge_one(),
    "quantise channels": lambda shape: shape.quantise(2, False),
    "quantise tokens": lambda shape: shape.quantise(2, True),
}


def launches(call: str, dim: int, capability: int) -> list[Launch]:
    with launches_on(capability, MODULES) as noted:
        CALLS[call](Shape(dim))
    return noted


def launched_somewhere() -> set[str]:
    """Kernels that stand as `kernel[grid](...)` in the modules' text."""
    calls = (node for module in MODULES for node in ast.walk(ast.parse(inspect.getsource(module))))
    return {
        node.func.value.id
        for node in calls
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }


def test_every_kernel_is_among_the_main_shapes() -> None:
    found = {launch.name for call in CALLS for launch in launches(call, 128, 90)}
    assert found == launched_somewhere()
    assert len(found) >= 20


def test_every_launcher_asks_a_gpu_for_launches_and_for_nothing_else() -> None:
    for call in CALLS:
        assert launches(call, 128, 90), call


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("call", "dim", "capability"),
    [
        pytest.param(call, dim, capability, marks=pytest.mark.slow)
        for call in CALLS
        for dim in (64, 128)
        for capability in SIZES
    ],
)
def test_the_main_shapes_compile_without_spills(call: str, dim: int, capability: int) -> None:
    for launch in launches(call, dim, capability):
        made = compiled_launch(launch, capability)
        assert made.shared <= SIZES[capability][0] * 1024
        assert made.spilled == 0, launch.name

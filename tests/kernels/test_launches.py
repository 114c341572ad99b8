"""Every kernel at the main shapes, as its launcher asks for it on an A100, an H100 and a B200, compiled: no spills.

`python -m pytest tests/kernels -k compile -v` compiles these and all odd shapes, and prints a table of what came out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_compiled import OPTIONS
from kernel_launched import MODULES, SIZES, Launch, Made, compiled_launch, launches_on
from torch.utils._pytree import tree_leaves

from kvbench.kernels import (
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    decode_attention_flat,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    selection,
    value_errors,
    window_largest,
    window_statistics,
)
from kvbench.kernels.packed import Packed, Side

H_KV, GROUP, SLOTS = 8, 4, 8192
FEW = 3  # configurations of a kernel on one architecture
Call = Callable[[], object]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def places(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.int32)


class Shape:
    """Calls of every launcher on a layer of 8 KV heads of `dim` numbers, 4 query heads each, and 8,192 slots."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dim, self.dtype = dim, dtype

    def slots(self) -> torch.Tensor:
        """As a model hands them over: heads beside each other."""
        return numbers(1, SLOTS, H_KV, self.dim, dtype=self.dtype).transpose(1, 2)

    def asking(self, queries: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys, both positions and the scaling."""
        asking = numbers(1, queries, H_KV * GROUP, self.dim, dtype=self.dtype).transpose(1, 2)
        return asking, self.slots(), numbers(1, queries, dtype=torch.int64), places(1, H_KV, SLOTS).long()

    def prompt_attention(self, aligned: bool) -> Call:
        queries, keys, *positions = self.asking(SLOTS)
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(prompt_attention.prompt_attention_triton, *call, aligned=aligned)

    def sums(self, launcher: Callable[..., object], aligned: bool) -> Call:
        lse = numbers(1, H_KV * GROUP, SLOTS, dtype=torch.float32)
        return partial(launcher, *self.asking(SLOTS), 0.1, log_sum_exp=lse, aligned=aligned)

    def decode(self, packed: bool) -> Call:
        queries, keys, *positions = self.asking(1)
        sums = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(decode_attention.decode_attention_triton, *call, packed=packed, weights=True, sums=sums)

    def decode_flat(self) -> Call:
        queries, _, asked, _ = self.asking(1)
        flat = numbers(H_KV * SLOTS, self.dim, dtype=self.dtype)
        where = numbers(1, H_KV, dtype=torch.int64)
        positions = places(H_KV * SLOTS)
        return partial(
            decode_attention_flat.decode_attention_flat_triton,
            queries,
            flat,
            flat,
            asked,
            positions,
            where,
            where,
            SLOTS,
            0.1,
            weights=True,
        )

    def quantised(self, bits: int, outliers: int) -> Call:
        def side(unit: int, tokens: int, channels: int, per_token: bool) -> Side:
            scale = numbers(1, H_KV, tokens, channels, dtype=torch.float16)
            words = places(1, H_KV, tokens, channels, unit * bits // 32)
            return Side(
                Packed(words, scale, scale, bits, unit, per_token), numbers(1, H_KV, 40, self.dim, dtype=self.dtype)
            )

        unit = 256 // bits
        keys, values = side(unit, SLOTS // unit, self.dim, False), side(self.dim, SLOTS, 1, True)
        exact = (numbers(1, H_KV, outliers, self.dim, dtype=self.dtype) for _ in range(2))
        pool = quantised_attention.Outliers(*exact, places(1, H_KV, outliers)) if outliers else None
        queries, _, asked, _ = self.asking(1)
        call = queries, asked, keys, values, 0.1
        return partial(quantised_attention.quantised_attention_triton, *call, outliers=pool)

    def value_errors(self, rows: int) -> Call:
        scores = numbers(1, H_KV, rows, SLOTS, dtype=torch.float32)
        counted = numbers(1, H_KV, SLOTS, dtype=torch.bool)
        return partial(value_errors.value_errors_triton, scores, self.slots(), counted, 1e-6)

    def chosen(self) -> tuple[torch.Tensor, ...]:
        scores = numbers(1, H_KV, SLOTS, dtype=torch.float32)
        return scores, scores, places(1, H_KV, SLOTS), numbers(1, H_KV, SLOTS, dtype=torch.bool)

    def compact(self) -> Call:
        state = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        buffers = {"keys": self.slots(), "values": self.slots(), "positions": places(1, H_KV, SLOTS)}
        kept = numbers(1, H_KV, 1024, dtype=torch.int64), places(1, H_KV)
        return partial(compaction.compact_triton, {**buffers, "sums": state, "squares": state}, *kept, spare=1)

    def merge_one(self) -> Call:
        victims, threshold = numbers(1, H_KV, 1, dtype=torch.int64), numbers(1, H_KV, dtype=torch.float32)
        return partial(
            nearest.merge_one_triton, self.slots(), self.slots(), places(1, H_KV, SLOTS), victims, threshold, 0.7, False
        )

    def quantise(self, bits: int, per_token: bool) -> Call:
        unit = self.dim if per_token else 256 // bits
        return partial(quantise.quantise_triton, self.slots(), unit, per_token, bits, torch.float16)


CALLS: dict[str, Callable[[Shape], Call]] = {
    "prompt attention": lambda shape: shape.prompt_attention(True),
    "prompt attention by position": lambda shape: shape.prompt_attention(False),
    "column sums": lambda shape: shape.sums(column_sums.column_sums_triton, True),
    "column sums by position": lambda shape: shape.sums(column_sums.column_sums_triton, False),
    "moments": lambda shape: shape.sums(attention_moments.attention_moments_triton, True),
    "moments by position": lambda shape: shape.sums(attention_moments.attention_moments_triton, False),
    "window of 32": lambda shape: partial(window_statistics.window_statistics_triton, *shape.asking(32), 0.1),
    "window of 32, largest head": lambda shape: partial(window_largest.window_largest_triton, *shape.asking(32), 0.1),
    "decode attention": lambda shape: shape.decode(True),
    "decode attention by position": lambda shape: shape.decode(False),
    "decode attention, flat": lambda shape: shape.decode_flat(),
    "quantised attention, 2 bits": lambda shape: shape.quantised(2, 0),
    "quantised attention, 2 bits, outliers": lambda shape: shape.quantised(2, 35),
    "quantised attention, 4 bits": lambda shape: shape.quantised(4, 0),
    "value errors": lambda shape: shape.value_errors(1),
    "value errors, 4 rows": lambda shape: shape.value_errors(GROUP),
    "select": lambda shape: partial(selection.select_triton, *shape.chosen(), 1024),
    "victim": lambda shape: partial(selection.victim_triton, *shape.chosen()),
    "kept slots": lambda shape: partial(compaction.kept_slots_triton, shape.chosen()[-1], 1024),
    "compact": lambda shape: shape.compact(),
    "nearest": lambda shape: partial(nearest.nearest_triton, shape.slots(), shape.slots(), shape.chosen()[-1]),
    "merge one": lambda shape: shape.merge_one(),
    "quantise channels": lambda shape: shape.quantise(2, False),
    "quantise tokens": lambda shape: shape.quantise(2, True),
}


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of all their memories, each counted once."""
    memories = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(memories.values())


def launches(call: str, dim: int, capability: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    with launches_on(capability, MODULES) as noted:
        CALLS[call](Shape(dim, dtype))()
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


def test_statistics_take_the_launches_they_are_said_to_take() -> None:
    """Twice the same kernel, or a pass more over the keys, would show here before it costs time on a GPU."""
    count = {call: len(launches(call, 128, 90)) for call in CALLS}
    three = {call for call in CALLS if call.startswith(("window", "quantised"))}
    two = {call for call in CALLS if call.startswith(("decode", "value errors", "merge"))}
    assert count == {call: 3 if call in three else 2 if call in two else 1 for call in CALLS}


@pytest.mark.parametrize("capability", SIZES)
def test_each_kernel_has_a_few_written_down_configurations(capability: int) -> None:
    """The same call asks for the same ones again."""
    asked: dict[str, set[tuple[object, ...]]] = {}
    for call in CALLS:
        for dim in (64, 128):
            first, again = ([_configuration(one) for one in launches(call, dim, capability)] for _ in range(2))
            assert first == again
            for name, *options in first:
                asked.setdefault(name, set()).add(tuple(options))
    assert {name: options for name, options in asked.items() if len(options) > FEW} == {}


def _configuration(launch: Launch) -> tuple[object, ...]:
    return launch.name, *(launch.arguments.get(option) for option in OPTIONS)


@pytest.mark.parametrize("name", CALLS)
def test_no_launcher_makes_rows_of_weights_or_a_copy_of_keys(name: str) -> None:
    """Beside what it returns, a sixth of one layer's keys at most: no [T,T], no [H_q,w,T], nothing dequantised."""
    with launches_on(90, MODULES):
        call = CALLS[name](Shape(128))
        with Made() as made:
            answer = call()
    returned = [x for x in tree_leaves(answer) if isinstance(x, torch.Tensor)]
    keys, queries = (2 * heads * SLOTS * 128 for heads in (H_KV, H_KV * GROUP))
    assert bytes_of(returned) <= (queries + 4 * H_KV * GROUP * SLOTS if name.startswith("prompt") else keys / 3)
    assert bytes_of([*made.tensors, *returned]) - bytes_of(returned) <= keys / 6


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


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("call", "dim"),
    [
        pytest.param(call, dim, marks=() if (call, dim) == ("column sums", 32) else pytest.mark.slow)
        for call in CALLS
        for dim in (32, 128)
    ],
)
def test_float32_is_never_multiplied_in_tf32(call: str, dim: int) -> None:
    """TF32 keeps 10 of 23 bits. A head of 32 numbers is multiplied whole, larger ones part by part."""
    for launch in launches(call, dim, 90, torch.float32):
        made = compiled_launch(launch, 90)
        if launch.name != "_tokens":  # three products in TF32, the parts of a number apart: as good as float32
            assert "tf32" not in made.ptx.lower(), launch.name


@pytest.mark.parametrize("call", [call for call in CALLS if "attention" in call or call in ("column sums", "nearest")])
def test_heads_beyond_256_are_refused_in_a_sentence(call: str) -> None:
    sentence = r"takes a head_dim of at most 256, got 512; use device=cpu"
    with launches_on(90, MODULES), pytest.raises(ValueError, match=sentence):
        CALLS[call](Shape(512))()

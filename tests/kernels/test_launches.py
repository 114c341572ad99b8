"""Every kernel at the main shapes, as its launcher asks for it on an A100, an H100 and a B200, compiled: no spills.

`python -m pytest tests/kernels -k compile -v` compiles these and all odd shapes, and prints a table of what came out.
"""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from kernel_calls import CALLS, GROUP, H_KV, SLOTS, Shape, launches
from kernel_compiled import OPTIONS
from kernel_launched import MODULES, SIZES, Launch, Made, compiled_launch, launches_on
from torch.utils._pytree import tree_leaves

FEW = 3  # configurations of a kernel on one architecture


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of all their memories, each counted once."""
    memories = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(memories.values())


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
    three = {call for call in CALLS if call.startswith("window")}
    two = {call for call in CALLS if call.startswith(("decode", "quantised", "value errors", "merge"))}
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
        assert "tf32" not in made.ptx.lower(), launch.name


@pytest.mark.parametrize("call", [call for call in CALLS if "attention" in call or call in ("column sums", "nearest")])
def test_heads_beyond_256_are_refused_in_a_sentence(call: str) -> None:
    sentence = r"takes a head_dim of at most 256, got 512; use device=cpu"
    with launches_on(90, MODULES), pytest.raises(ValueError, match=sentence):
        CALLS[call](Shape(512))()

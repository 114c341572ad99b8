"""Every kernel as its launcher asks for it on four GPUs since 2020: launches, memory, and compiled code."""

from __future__ import annotations

import ast
import inspect
from itertools import product

import pytest
import torch
from kernel_calls import CALLS, GROUP, H_KV, SLOTS, Shape, launches
from kernel_launched import MODULES, SIZES, Made, compiled_launch, launches_on
from torch.utils._pytree import tree_leaves


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


FAST = ("column sums", "prompt attention", "decode attention")
SIGNS = {
    **dict.fromkeys(("prompt attention", "column sums", "moments"), "cp.async"),  # the next tile is on its way
    "decode attention": "cp.async.cg.shared.global",  # 16 bytes a load
    **dict.fromkeys(("compact", "value errors"), "ld.global.v4.b32"),
    **dict.fromkeys(("quantise channels", "quantise tokens"), "div.rn.f32"),  # as exact as PyTorch's division
}
CAPPED = {"softcap": 30.0, "sliding_window": 999}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("call", "dim", "capability"),
    [
        pytest.param(
            *case, marks=() if case[1:] == (128, 90) and case[0] in FAST else pytest.mark.slow("compiles kernels")
        )
        for case in product(CALLS, (64, 80, 128, 256), SIZES)
    ],
)
def test_every_kernel_compiles_without_spills_into_what_the_gpu_has(call: str, dim: int, capability: int) -> None:
    found = launches(call, dim, capability)
    made = [compiled_launch(launch, capability) for launch in found]
    for launch, one in zip(found, made, strict=True):
        assert one.shared <= SIZES[capability][0] * 1024, launch.name
        few = 8 if call.startswith("decode") and dim not in (64, 128) else 0
        assert one.spilled <= few or capability == 89, launch.name
    assert dim != 128 or SIGNS.get(call, "") in made[0].ptx


@pytest.mark.slow("compiles kernels")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", SIZES)
@pytest.mark.parametrize("call", [call for call in CALLS if call.startswith(("prompt", "column", "mom", "win", "dec"))])
def test_soft_caps_and_sliding_windows_compile_too(call: str, capability: int) -> None:
    for dim in (80, 256):
        for launch in launches(call, dim, capability, **CAPPED):
            assert compiled_launch(launch, capability).shared <= SIZES[capability][0] * 1024, launch.name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("call", "dim"),
    [
        pytest.param(*case, marks=() if case == ("column sums", 32) else pytest.mark.slow("compiles kernels"))
        for case in product(CALLS, (32, 128))
    ],
)
def test_float32_is_never_multiplied_in_tf32(call: str, dim: int) -> None:
    """TF32 keeps 10 of 23 bits. A head of 32 numbers is multiplied whole, larger ones part by part."""
    for launch in launches(call, Shape(dim, torch.float32), 90):
        made = compiled_launch(launch, 90)
        assert "tf32" not in made.ptx.lower(), launch.name


@pytest.mark.parametrize("call", [call for call in CALLS if "largest" not in call])  # which has no axis of heads
def test_more_than_65535_heads_are_launched_on_the_axis_that_takes_them(call: str) -> None:
    """Layers that evict side by side are rows of one batch; of CUDA's axes only the first takes so many."""
    found = [launch.grid for launch in launches(call, Shape(64, batch=8193, slots_held=1024), 90)]
    heads = found[call.startswith("decode") :]  # whose programs share a list of all heads
    assert all(grid[0] >= 8193 * H_KV for grid in heads)
    assert all(size <= 65_535 for grid in found for size in grid[1:])


@pytest.mark.parametrize("call", [call for call in CALLS if "attention" in call or call in ("column sums", "nearest")])
def test_heads_beyond_256_are_refused_in_a_sentence(call: str) -> None:
    sentence = r"takes a head_dim of at most 256, got 512; use device=cpu"
    with launches_on(90, MODULES), pytest.raises(ValueError, match=sentence):
        CALLS[call](Shape(512))()

"""The kernels of decode attention compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from decode_cases import DECODE_CASES, DecodeCase, decoded
from kernel_compiled import LITTLE, Compiled
from kernel_launched import MODULES, compiled_launch, launches_on
from torch import Tensor

from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref, decode_attention_flat_triton

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def made(
    capability: int, group: int, new: int, dim: int, dtype: torch.dtype, placed: bool, asked: bool = False
) -> list[Compiled]:
    """Both launches with weights and sums, compiled; asked: flat slots, sinks, soft cap and window as well."""
    slots = 4096

    def numbers(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with launches_on(capability, MODULES) as launches:
        queries, where = numbers(1, 2 * group, new, dim), numbers(1, new, dtype=torch.int64)
        lead = (2 * slots,) if asked else (1, 2, slots)
        stored = numbers(*lead, dim), numbers(*lead, dim), where, numbers(*lead, dtype=torch.int32)
        sums = numbers(*lead, group if asked else 1, dtype=torch.float32)
        if asked:
            counts = numbers(1, 2, dtype=torch.int64)
            call = (queries, *stored, counts, counts, slots, 0.1, 30.0, 999, numbers(2 * group))
            decode_attention_flat_triton(*call, weights=True, sums=sums)
        else:
            decode_attention_triton(queries, *stored, 0.1, packed=not placed, weights=True, sums=sums)
    return [compiled_launch(launch, capability) for launch in launches]


def check(made: Compiled) -> None:
    assert made.shared <= LITTLE
    assert made.spilled <= 8, "a number or two; at the main shapes none"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("placed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_main_shape_compiles_for_hopper_and_loads_ahead(placed: bool) -> None:
    attend, _ = made(90, 4, 1, 128, torch.bfloat16, placed)
    assert attend.spilled == 0
    assert 4 * 16 * 1024 < attend.shared <= LITTLE, "two tiles of keys and two of values are on their way"
    assert "async_copy" in attend.ttgir
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", attend.ptx), "16 bytes a load"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("group", "new", "dim", "dtype", "asked"),
    [
        (1, 1, 64, torch.float16, False),
        (7, 1, 80, torch.bfloat16, False),
        (3, 1, 96, torch.bfloat16, True),
        (5, 1, 112, torch.float16, False),
        (8, 16, 128, torch.bfloat16, True),
        (4, 1, 192, torch.bfloat16, False),
        (2, 1, 256, torch.bfloat16, False),
        (8, 16, 256, torch.float16, False),
        (4, 1, 128, torch.float32, False),
        (8, 1, 256, torch.float32, True),
    ],
)
def test_every_shape_compiles_for_any_gpu_since_2020(
    capability: int, group: int, new: int, dim: int, dtype: torch.dtype, asked: bool
) -> None:
    for placed in (True,) if asked else (True, False):
        for launch in made(capability, group, new, dim, dtype, placed, asked):
            check(launch)


def agree(call: dict[str, Any], dtype: torch.dtype) -> None:
    """The kernels on a CUDA device against the reference there; what they do not write is not a number."""
    again = {name: x for name, x in call.items() if name != "programs"}
    if again.get("sums") is not None:
        again["sums"] = again["sums"].clone()
    torch.empty(2**26, device="cuda").fill_(torch.nan)  # freed at once: the next tensors are cut from it
    got, expected = decoded(call), decoded(again, decode_attention_ref, decode_attention_flat_ref)
    for name, theirs in expected.items():
        if theirs is not None:
            tolerance = TOLERANCES[dtype] if name == "out" else 1e-4
            torch.testing.assert_close(got[name], theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", DECODE_CASES)
def test_a_cuda_device_gives_what_the_reference_gives(name: str) -> None:
    agree(DECODE_CASES[name].draw(1, "cuda"), DECODE_CASES[name].dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_shapes_agree_on_a_cuda_device(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    chance = random.Random(str(dtype))
    for _ in range(40):
        slots, group = chance.choice([1, 63, 64, 1000, 4096, 20_000]), chance.randint(1, 8)
        case = DecodeCase(
            chance.randint(1, 3), chance.choice([1, 2, 8]), group, chance.choice([1, 1, 2, 16]), slots,
            *(chance.choice([64, 80, 96, 112, 128, 192, 256]) for _ in range(2)), dtype,
            softcap=chance.choice([None, 30.0]), sliding_window=chance.choice([None, 100, 5000]),
            sinks=chance.random() < 0.3, packed=chance.random() < 0.3, empty=0, padded=chance.random() < 0.3,
            weights=chance.random() < 0.5, sums=chance.choice([0, 1, group]), flat=chance.random() < 0.3,
        )  # fmt: skip
        if not case.packed:
            case = DecodeCase(**{**vars(case), "empty": chance.randint(0, slots)})
        agree(case.draw(chance.randrange(2**32), "cuda"), dtype)


@pytest.mark.gpu
@on_gpu
def test_more_than_two_to_the_31_numbers() -> None:
    slots = 2**31 // (8 * 128) + 300  # of 8 KV heads of 128 numbers in float16: 4.3 GB of keys, as many of values
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    keys, values = (torch.empty(1, slots, 8, 128, dtype=torch.float16, device="cuda").normal_() for _ in range(2))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    queries = torch.randn(1, 8, 1, 128, dtype=torch.float16, device="cuda")
    got = decode_attention_triton(queries, keys, values, None, None, 0.5, packed=True)
    for head in (0, 7):
        one = (x[:, head : head + 1] for x in (queries, keys, values))
        expected = decode_attention_ref(*one, None, None, 0.5, packed=True)
        torch.testing.assert_close(got.out[:, head : head + 1], expected.out, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got.log_sum_exp[:, head : head + 1], expected.log_sum_exp, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    call = DecodeCase(2, 2, 4, 1, 3000, 128, 128, torch.bfloat16, weights=True, sums=1).draw(0, "cuda")
    call["keys"].nan_to_num_()
    decode_attention_triton(**call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_attention_triton(**call)
    call["queries"].normal_()
    before: Tensor = call["sums"].clone()
    graph.replay()
    again = {**call, "sums": before}
    expected = decode_attention_ref(**{name: x for name, x in again.items() if name != "programs"})
    torch.testing.assert_close(got.out, expected.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(call["sums"], before, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_follows_the_lengths_of_flat_segments() -> None:
    call = DecodeCase(2, 2, 4, 1, 3000, 128, 128, torch.bfloat16, flat=True).draw(0, "cuda")
    call["keys"].nan_to_num_()
    decode_attention_flat_triton(**call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_attention_flat_triton(**call)
    call["counts"].floor_divide_(3)
    graph.replay()
    expected = decode_attention_flat_ref(**{name: x for name, x in call.items() if name != "programs"})
    torch.testing.assert_close(got.out, expected.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=1e-4, atol=1e-4)

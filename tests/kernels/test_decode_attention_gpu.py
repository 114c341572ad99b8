"""The kernels of decode attention compiled for GPUs that are not there, and run on one that is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decode_cases import DECODE_CASES, DecodeCase, decoded
from torch import Tensor

from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


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

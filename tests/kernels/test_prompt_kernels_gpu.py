"""The kernels that read a prompt, on a GPU: any shape, long prompts, tensors beyond 2^31 numbers, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels.attention_moments import (
    attention_moments_ref,
    attention_moments_triton,
)
from kvbench.kernels.column_sums import column_sums_ref, column_sums_triton
from kvbench.kernels.prompt_attention import prompt_attention, prompt_attention_ref, prompt_attention_triton
from kvbench.kernels.window_statistics import window_statistics_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (64, 80, 96, 112, 128, 192, 256)
OUT = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def prompt(
    random: torch.Generator, batch: int, heads: int, group: int, new: int, slots: int, dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Slots 0.., the last of which ask; strides as a model hands them over."""

    def draw(tokens: int, many: int) -> Tensor:
        return torch.randn(batch, tokens, many, dim, generator=random, device="cuda").to(dtype).transpose(1, 2)

    at = torch.arange(slots, device="cuda")
    return {
        "queries": draw(new, heads * group),
        "keys": draw(slots, heads),
        "query_positions": at[slots - new :].repeat(batch, 1),
        "key_positions": at.repeat(batch, heads, 1),
        "scaling": dim**-0.5,
    }


def any_call(seed: int) -> tuple[dict[str, Any], bool]:
    """A call of sizes that only the seed knows, and whether its slots are in order."""
    chance = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=chance))

    slots = some(1, 900)
    new, dim, dtype = some(1, slots), DIMS[some(0, len(DIMS) - 1)], DTYPES[some(0, 2)]
    random = torch.Generator("cuda").manual_seed(seed)
    call = prompt(random, some(1, 2), some(1, 3), some(1, 8), new, slots, dim, dtype)
    call["softcap"] = 5.0 if some(0, 3) == 0 else None
    call["sliding_window"] = some(1, slots) if some(0, 2) == 0 else None
    aligned = some(0, 1) == 0
    if not aligned:
        order = torch.randperm(slots, generator=random, device="cuda")
        call["key_positions"] = call["key_positions"][..., order]
        call["key_positions"][torch.rand(call["key_positions"].shape, generator=random, device="cuda") < 0.1] = -1
        call["query_positions"][-1, : some(0, new)] = -1
    return call, aligned


@pytest.mark.parametrize("seed", range(60))
def test_any_call_gives_what_the_references_give(seed: int) -> None:
    call, aligned = any_call(seed)
    values = torch.randn_like(call["keys"])
    exact = prompt_attention_ref(values=values, **call)
    for how in {aligned, False}:
        got = prompt_attention(values=values, **call, aligned=how)
        torch.testing.assert_close(got.log_sum_exp, exact.log_sum_exp, rtol=1e-4, atol=1e-4)
        limit = OUT[values.dtype]
        torch.testing.assert_close(got.out, exact.out, rtol=limit, atol=limit)
        sums = column_sums_triton(**call, log_sum_exp=got.log_sum_exp, aligned=how)
        torch.testing.assert_close(sums, column_sums_ref(**call), rtol=1e-3, atol=1e-3)
        moments = attention_moments_triton(**call, log_sum_exp=got.log_sum_exp, aligned=how)
        torch.testing.assert_close(moments, attention_moments_ref(**call), rtol=1e-3, atol=1e-3)


def test_a_cuda_graph_replays_them() -> None:
    call = prompt(torch.Generator("cuda").manual_seed(1), 1, 2, 4, 512, 512, 128, torch.bfloat16)
    newest = {**call, "queries": call["queries"][:, :, -32:], "query_positions": call["query_positions"][:, -32:]}

    def run() -> list[Tensor]:
        out, log_sum_exp = prompt_attention_triton(values=call["keys"], **call, aligned=True)
        told = {"log_sum_exp": log_sum_exp, "aligned": True}
        return [
            out,
            column_sums_triton(**call, **told),
            *attention_moments_triton(**call, **told),
            *window_statistics_triton(**newest),
        ]

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    call["queries"].mul_(-0.5)
    graph.replay()
    for replayed, fresh in zip(captured, run(), strict=True):
        torch.testing.assert_close(replayed, fresh, rtol=0, atol=0)

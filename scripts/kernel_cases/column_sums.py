# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Column sums and moments of whole prompts, given the forward's log-sum-exp, beside the attention forward itself.

The provider `forward` is that attention: its output is not a statistic and is not compared; its time is what the extra
pass is measured by.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import H_KV, H_Q, call_of, causal_sdpa, dtype_name, scaled
from torch import Tensor

from kvbench.kernels.attention_moments import attention_moments_triton
from kvbench.kernels.column_sums import column_sums_blocked, column_sums_triton
from kvbench.kernels.prompt_attention import prompt_attention
from kvbench.kernels.softmax_blocks import softmax_blocks
from kvbench.tools.bench.kernels import KernelCase

SHAPES = [(tokens, 128, torch.bfloat16) for tokens in (4096, 8192, 16384, 32768, 65536)]
SHAPES += [
    (8192, 64, torch.bfloat16),
    (8192, 256, torch.bfloat16),
    (8192, 80, torch.float16),
    (4096, 128, torch.float32),
]


def setup(device: torch.device, tokens: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A prompt and its log-sum-exp."""
    call = call_of(device, tokens, tokens, dim, dtype)
    return {**call, "log_sum_exp": prompt_attention(**call, aligned=True).log_sum_exp}


def sums_in_blocks(values: Tensor, log_sum_exp: Tensor, **call: Any) -> Tensor:
    return column_sums_blocked(**call)


def sums(values: Tensor, **call: Any) -> Tensor:
    return column_sums_triton(**call, aligned=True)


def sums_by_position(values: Tensor, **call: Any) -> Tensor:
    return column_sums_triton(**call)


def sums_alone(values: Tensor, log_sum_exp: Tensor, **call: Any) -> Tensor:
    return column_sums_triton(**call, aligned=True)


def moments_in_blocks(values: Tensor, log_sum_exp: Tensor, **call: Any) -> Tensor:
    total = torch.zeros(2, *call["key_positions"].shape, device=values.device)
    for reached, weights, inverse in softmax_blocks(**call):
        mean = (weights * inverse[..., None]).mean(2)
        total[0][..., reached] += mean.sum(-2)
        total[1][..., reached] += mean.square().sum(-2)
    return total


def moments(values: Tensor, **call: Any) -> Tensor:
    return torch.stack(attention_moments_triton(**call, aligned=True))


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of an 8B model's heads. flops: one product for every pair that the causal mask lets through."""
    by_kernel = {
        "column_sums": {"blocked": sums_in_blocks, "triton": sums, "positions": sums_by_position, "alone": sums_alone},
        "attention_moments": {"blocked": moments_in_blocks, "triton": moments},
    }
    for whole, dim, dtype in SHAPES:
        tokens = scaled(whole, scale)
        rows = (H_Q + H_KV) * tokens * dim * dtype.itemsize + 4 * H_Q * tokens
        for kernel, providers in by_kernel.items():
            yield KernelCase(
                kernel,
                f"T={tokens} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}",
                partial(setup, tokens=tokens, dim=dim, dtype=dtype),
                {**providers, "forward": causal_sdpa},
                bytes_moved=rows + 4 * tokens * (H_Q if kernel == "column_sums" else 2 * H_KV),
                flops=2 * dim * H_Q * tokens * (tokens + 1) // 2,
                tolerance=1e-3,
                beside=("forward",),
            )

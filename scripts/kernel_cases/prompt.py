# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Whole prompts: attention with its log-sum-exp, column sums and moments of it, statistics of its last queries.

The provider `forward` of the statistics is the attention itself: it is not compared; its time is what the extra pass is
measured by.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from kernel_cases.case import H_KV, H_Q, call_of, causal_sdpa, dtype_name, provider, scaled
from torch import Tensor

from kvbench.kernels.attention_moments import attention_moments_triton
from kvbench.kernels.column_sums import column_sums_blocked, column_sums_triton
from kvbench.kernels.masked_attention import masked_attention
from kvbench.kernels.prompt_attention import prompt_attention, prompt_attention_triton
from kvbench.kernels.softmax_blocks import softmax_blocks
from kvbench.kernels.window_statistics import window_statistics_ref, window_statistics_triton
from kvbench.tools.bench.kernels import KernelCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 4096  # tokens up to which the masked path of PyTorch, which computes all it masks, is asked
ATTENTION = [(tokens, 128, BF16, None, None) for tokens in (4096, 8192, 32768)]  # tokens, D, dtype, softcap, window
ATTENTION += [(8192, 64, FP16, None, None), (4096, 256, BF16, None, None), (LIMIT, 256, BF16, 50.0, None)]
ATTENTION += [(LIMIT, 128, BF16, None, 1024), (LIMIT, 128, FP32, None, None)]
SUMS = [(tokens, 128, BF16) for tokens in (4096, 8192, 16384, 32768, 65536)]
SUMS += [(8192, 64, BF16), (8192, 256, BF16), (8192, 80, FP16), (4096, 128, FP32)]
WINDOWS = [(32, slots, 128, BF16) for slots in (4096, 32768, 131072)]
WINDOWS += [(8, 32768, 128, BF16), (64, 32768, 128, BF16), (32, 32768, 80, FP16), (32, 16384, 256, BF16)]
WINDOWS += [(32, 16384, 128, FP32)]


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """Prompts of an 8B model's heads."""
    for shape in ATTENTION:
        yield _attention(*shape, scale)
    for whole, dim, dtype in SUMS:
        yield from _sums(scaled(whole, scale), dim, dtype)
    for window, whole, dim, dtype in WINDOWS:
        yield from _statistics(window, scaled(whole, scale), dim, dtype)


def _attention(
    whole: int, dim: int, dtype: torch.dtype, softcap: float | None, window: int | None, scale: int
) -> KernelCase:
    """flops: two products for every pair that mask and window let through."""
    tokens = scaled(whole, scale)
    reach = min(window or tokens, tokens)
    plain = softcap is None and window is None
    known = {"sdpa": causal_sdpa} if plain else {"masked": provider(masked_attention, columns=True)}
    kind = "".join((" softcap" if softcap else "", f" window={window}" if window else ""))

    def setup(device: torch.device) -> dict[str, Any]:
        return {**call_of(device, tokens, tokens, dim, dtype), "softcap": softcap, "sliding_window": window}

    out = attrgetter("out")
    return KernelCase(
        "prompt_attention",
        f"T={tokens} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}{kind}",
        setup,
        {
            **known,
            "triton": provider(prompt_attention_triton, out, aligned=True),
            "positions": provider(prompt_attention_triton, out),
        },
        bytes_moved=2 * (H_Q + H_KV) * tokens * dim * dtype.itemsize + 4 * H_Q * tokens,
        flops=4 * dim * H_Q * (reach * (reach + 1) // 2 + (tokens - reach) * reach),
    )


def _prompt(device: torch.device, tokens: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A prompt and its log-sum-exp."""
    call = call_of(device, tokens, tokens, dim, dtype)
    return {**call, "log_sum_exp": prompt_attention(**call, aligned=True).log_sum_exp}


def _moments_in_blocks(values: Tensor, log_sum_exp: Tensor, **call: Any) -> Tensor:
    total = torch.zeros(2, *call["key_positions"].shape, device=values.device)
    for reached, weights, inverse in softmax_blocks(**call):
        mean = (weights * inverse[..., None]).mean(2)
        total[0][..., reached] += mean.sum(-2)
        total[1][..., reached] += mean.square().sum(-2)
    return total


def _sums(tokens: int, dim: int, dtype: torch.dtype) -> Iterator[KernelCase]:
    """flops: one product for every pair that the causal mask lets through."""
    alone = ("values", "log_sum_exp")
    by_kernel = {
        "column_sums": {
            "blocked": provider(column_sums_blocked, without=alone),
            "triton": provider(column_sums_triton, without=("values",), aligned=True),
            "positions": provider(column_sums_triton, without=("values",)),
            "alone": provider(column_sums_triton, without=alone, aligned=True),
        },
        "attention_moments": {
            "blocked": _moments_in_blocks,
            "triton": provider(attention_moments_triton, torch.stack, without=("values",), aligned=True),
        },
    }
    rows = (H_Q + H_KV) * tokens * dim * dtype.itemsize + 4 * H_Q * tokens
    for kernel, providers in by_kernel.items():
        yield KernelCase(
            kernel,
            f"T={tokens} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}",
            partial(_prompt, tokens=tokens, dim=dim, dtype=dtype),
            {**providers, "forward": causal_sdpa},
            bytes_moved=rows + 4 * tokens * (H_Q if kernel == "column_sums" else 2 * H_KV),
            flops=2 * dim * H_Q * tokens * (tokens + 1) // 2,
            tolerance=1e-3,
            beside=("forward",),
        )


def _statistics(window: int, slots: int, dim: int, dtype: torch.dtype) -> Iterator[KernelCase]:
    """bytes_moved: the keys twice, since a row's sum must be known before its weights; flops: the products of both."""
    rows, ours = (
        partial(provider, function, without=("values",))
        for function in (window_statistics_ref, window_statistics_triton)
    )
    sums, every = attrgetter("sums"), torch.cat
    kinds = {"sums": (rows(sums), ours(sums, spread=False), 1), "all": (rows(every), ours(every), 3)}
    for kind, (reference, triton, results) in kinds.items():
        yield KernelCase(
            "window_statistics",
            f"{kind} w={window} T={slots} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}",
            partial(call_of, queries=window, slots=slots, dim=dim, dtype=dtype),
            {"rows": reference, "triton": triton},
            bytes_moved=2 * H_KV * slots * dim * dtype.itemsize + 4 * results * H_Q * slots,
            flops=4 * window * H_Q * slots * dim,
        )

# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Attention of a prompt with its log-sum-exp: ours beside PyTorch's, plain, soft-capped and with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import H_KV, H_Q, call_of, causal_sdpa, dtype_name, scaled
from torch import Tensor

from kvbench.kernels.masked_attention import masked_attention
from kvbench.kernels.prompt_attention import prompt_attention_triton
from kvbench.tools.bench.kernels import KernelCase

LIMIT = 4096  # tokens up to which the masked path of PyTorch, which computes all it masks, is asked
PLAIN = [(tokens, 128, torch.bfloat16, None, None) for tokens in (4096, 8192, 32768)]
PLAIN += [(8192, 64, torch.float16, None, None), (4096, 256, torch.bfloat16, None, None)]
ODD = [(LIMIT, 256, torch.bfloat16, 50.0, None), (LIMIT, 128, torch.bfloat16, None, 1024)]
ODD += [(LIMIT, 128, torch.float32, None, None)]


def setup(
    device: torch.device, tokens: int, dim: int, dtype: torch.dtype, softcap: float | None, window: int | None
) -> dict[str, Any]:
    return {**call_of(device, tokens, tokens, dim, dtype), "softcap": softcap, "sliding_window": window}


def masked(**call: Any) -> Tensor:
    return masked_attention(**call, columns=True)


def ours(**call: Any) -> Tensor:
    return prompt_attention_triton(**call, aligned=True).out


def by_position(**call: Any) -> Tensor:
    return prompt_attention_triton(**call).out


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """flops: two products for every pair that mask and window let through."""
    for whole, dim, dtype, softcap, window in PLAIN + ODD:
        tokens = scaled(whole, scale)
        reach = min(window or tokens, tokens)
        known = {"sdpa": causal_sdpa} if softcap is None and window is None else {"masked": masked}
        kind = "".join((" softcap" if softcap else "", f" window={window}" if window else ""))
        yield KernelCase(
            "prompt_attention",
            f"T={tokens} H={H_Q}/{H_KV} D={dim} {dtype_name(dtype)}{kind}",
            partial(setup, tokens=tokens, dim=dim, dtype=dtype, softcap=softcap, window=window),
            {**known, "triton": ours, "positions": by_position},
            bytes_moved=2 * (H_Q + H_KV) * tokens * dim * dtype.itemsize + 4 * H_Q * tokens,
            flops=4 * dim * H_Q * (reach * (reach + 1) // 2 + (tokens - reach) * reach),
        )

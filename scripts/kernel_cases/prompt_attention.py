# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Attention of a prompt with its log-sum-exp: ours beside PyTorch's, plain, soft-capped and with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import KernelCase, scaled
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.masked_attention import masked_attention
from kvbench.kernels.prompt_attention import prompt_attention_triton

H_Q, H_KV = 32, 8
LIMIT = 4096  # tokens up to which the masked path of PyTorch, which computes all it masks, is asked


def setup(
    device: torch.device, tokens: int, dim: int, dtype: torch.dtype, softcap: float | None, window: int | None
) -> dict[str, Any]:
    random = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=random, device=device, dtype=dtype)
    places = torch.arange(tokens, device=device)
    return {
        "queries": draw(1, tokens, H_Q, dim).transpose(1, 2),
        "keys": draw(1, tokens, H_KV, dim).transpose(1, 2),
        "values": draw(1, tokens, H_KV, dim).transpose(1, 2),
        "query_positions": places[None],
        "key_positions": places.repeat(1, H_KV, 1),
        "scaling": dim**-0.5,
        "softcap": softcap,
        "sliding_window": window,
    }


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)


def masked(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **call: Any) -> Tensor:
    return masked_attention(queries, keys, values, scaling=scaling, **call, columns=True)


def ours(**call: Any) -> Tensor:
    return prompt_attention_triton(**call, aligned=True).out


def by_position(**call: Any) -> Tensor:
    return prompt_attention_triton(**call).out


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """flops: two products for every pair that mask and window let through."""
    plain = [(tokens, 128, torch.bfloat16, None, None) for tokens in (4096, 8192, 32768)]
    plain += [(8192, 64, torch.float16, None, None), (4096, 256, torch.bfloat16, None, None)]
    odd = [(LIMIT, 256, torch.bfloat16, 50.0, None), (LIMIT, 128, torch.bfloat16, None, 1024)]
    odd += [(LIMIT, 128, torch.float32, None, None)]
    for whole, dim, dtype, softcap, window in plain + odd:
        tokens = scaled(whole, scale)
        reach = min(window or tokens, tokens)
        pairs = reach * (reach + 1) // 2 + (tokens - reach) * reach
        known = sdpa if softcap is None and window is None else masked
        kind = "".join((" softcap" if softcap else "", f" window={window}" if window else ""))
        yield KernelCase(
            kernel="prompt_attention",
            label=f"T={tokens} H={H_Q}/{H_KV} D={dim} {str(dtype).removeprefix('torch.')}{kind}",
            setup=partial(setup, tokens=tokens, dim=dim, dtype=dtype, softcap=softcap, window=window),
            providers={known.__name__: known, "triton": ours, "positions": by_position},
            bytes_moved=2 * (H_Q + H_KV) * tokens * dim * dtype.itemsize + 4 * H_Q * tokens,
            flops=4 * dim * H_Q * pairs,
        )

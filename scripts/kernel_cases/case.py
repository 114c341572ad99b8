# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""What cases share: the heads of an 8B model, inputs of an attention call, how a function becomes a provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

H_Q, H_KV, DIM = 32, 8, 128
GROUP = H_Q // H_KV
LEAST = 128  # tokens, which whole groups of codes divide


def scaled(tokens: int, scale: int) -> int:
    """A number of tokens for a smaller machine: divided by `scale`, a multiple of LEAST unless it was less."""
    return tokens if scale == 1 else min(tokens, max(LEAST, tokens // scale // LEAST * LEAST))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def provider(
    function: Callable[..., Any],
    take: Callable[[Any], Any] | None = None,
    without: Sequence[str] = (),
    **fixed: Any,
) -> Callable[..., Any]:
    """`function` as a provider. take: picks what is compared; without: inputs it does not take; fixed: more of them."""

    def call(**inputs: Any) -> Any:
        result = function(**{name: value for name, value in inputs.items() if name not in without}, **fixed)
        return result if take is None else take(result)

    return call


def call_of(
    device: torch.device, queries: int, slots: int, dim: int, dtype: torch.dtype, batch: int = 1
) -> dict[str, Any]:
    """The newest queries over all slots, as a model hands them over: the heads of a token beside each other."""
    random = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=random, device=device, dtype=dtype)
    places = torch.arange(slots, device=device)
    return {
        "queries": draw(batch, queries, H_Q, dim).transpose(1, 2),
        "keys": draw(batch, slots, H_KV, dim).transpose(1, 2),
        "values": draw(batch, slots, H_KV, dim).transpose(1, 2),
        "query_positions": places[None, -queries:].expand(batch, -1),
        "key_positions": places.repeat(batch, H_KV, 1),
        "scaling": dim**-0.5,
    }


def normal(device: torch.device, *shape: int) -> Tensor:
    """Random numbers in bfloat16, drawn on the device: a hundred million of them are seconds of a CPU."""
    random = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)


def causal_sdpa(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)

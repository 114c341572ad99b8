"""Quantising and packing a prompt of an 8B model's layer, per channel and per token, and one group while decoding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import DIM, H_KV, scaled
from torch import Tensor

from kvbench.kernels.quantise import Filled, quantise_triton
from kvbench.policies.stores.quantiser import Quantiser
from kvbench.tools.bench.kernels import KernelCase

BITS = 2
SHAPES = [(1, 32_768, 32), (1, 32_768, 128), (8, 32_768, 128), (32, 128, 128)]  # sequences, tokens, group


def setup(device: torch.device, batch: int, tokens: int, unit: int, per_token: bool, traced: bool) -> dict[str, Any]:
    """Keys or values in bfloat16; where some are traced, 3 of every group, with its mean to stand in."""
    torch.manual_seed(0)
    x = torch.randn(batch, H_KV, tokens, DIM, device=device, dtype=torch.bfloat16)
    filled = None
    if traced:
        mask = torch.rand(batch, H_KV, tokens // unit, unit, device=device).argsort(-1) < 3
        filled = Filled(mask.flatten(2), x.float().unflatten(2, (-1, unit)).mean(3), unit)
    return {"x": x, "unit": unit, "per_token": per_token, "filled": filled}


def pytorch(x: Tensor, unit: int, per_token: bool, filled: Filled | None) -> Tensor:
    """The quantiser of the stores, as on CPUs."""
    dtype = x.dtype
    if filled is not None:
        x = torch.where(filled.traced[..., None], filled.rows.repeat_interleave(filled.each, dim=2), x.float())
    groups = x.unflatten(3, (-1, unit)) if per_token else x.unflatten(2, (-1, unit)).transpose(-1, -2)
    return Quantiser(BITS).quantise(groups, dtype).scale


def triton(x: Tensor, unit: int, per_token: bool, filled: Filled | None) -> Tensor:
    """The kernel."""
    return quantise_triton(x, unit, per_token, BITS, torch.float16, filled=filled).scale


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """A long prompt, and the group that decoding fills every 128 tokens. Outputs compared: the scales.

    Codes are compared bit by bit in the tests; a device of its own divides by a constant with a product (PyTorch on
    CUDA), which moves a scale by one in the last place and with it a few codes.
    """
    for batch, whole, unit in SHAPES:
        tokens = scaled(whole, scale)
        numbers = batch * H_KV * tokens * DIM
        for per_token in (False, True):
            for traced in (False, True):
                side, pool = "values" if per_token else "keys", ", outliers" if traced else ""
                yield KernelCase(
                    "quantise",
                    f"B={batch} H={H_KV} T={tokens} D={DIM} {BITS} bits of {unit}, {side}{pool}",
                    partial(setup, batch=batch, tokens=tokens, unit=unit, per_token=per_token, traced=traced),
                    {"pytorch": pytorch, "triton": triton},
                    # numbers in; codes, scales and minima out; a byte for every token that may be traced
                    bytes_moved=numbers * 2 + numbers * BITS // 8 + 4 * numbers // unit + numbers // DIM * traced,
                    tolerance=1e-3,
                )

"""Quantising and packing a prompt of an 8B model's layer, per channel and per token, and one group while decoding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import KernelCase, scaled
from torch import Tensor

from kvbench.kernels.quantise import Filled, quantise_triton
from kvbench.policies.stores.quantiser import Quantiser

HEADS, DIM, UNIT = 8, 128, 128


def setup(device: torch.device, batch: int, tokens: int, per_token: bool, bits: int, traced: bool) -> dict[str, Any]:
    """Keys or values in bfloat16; where some are traced, 3 of every group, with its mean to stand in."""
    torch.manual_seed(0)
    x = torch.randn(batch, HEADS, tokens, DIM, device=device, dtype=torch.bfloat16)
    filled = None
    if traced:
        mask = torch.rand(batch, HEADS, tokens // UNIT, UNIT, device=device).argsort(-1) < 3
        filled = Filled(mask.flatten(2), x.float().unflatten(2, (-1, UNIT)).mean(3), UNIT)
    return {"x": x, "unit": UNIT, "per_token": per_token, "bits": bits, "filled": filled}


def pytorch(x: Tensor, unit: int, per_token: bool, bits: int, filled: Filled | None) -> Tensor:
    """The quantiser of the stores, as on CPUs."""
    dtype = x.dtype
    if filled is not None:
        x = torch.where(filled.traced[..., None], filled.rows.repeat_interleave(filled.each, dim=2), x.float())
    groups = x.unflatten(3, (-1, unit)) if per_token else x.unflatten(2, (-1, unit)).transpose(-1, -2)
    return Quantiser(bits).quantise(groups, dtype).scale


def triton(x: Tensor, unit: int, per_token: bool, bits: int, filled: Filled | None) -> Tensor:
    """The kernel."""
    return quantise_triton(x, unit, per_token, bits, torch.float16, filled=filled).scale


def bytes_moved(batch: int, tokens: int, bits: int, traced: bool) -> int:
    """Numbers in, codes, scales and minima out; a byte for every token that may be traced."""
    numbers = batch * HEADS * tokens * DIM
    return numbers * 2 + numbers * bits // 8 + 4 * numbers // UNIT + (batch * HEADS * tokens if traced else 0)


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """A long prompt, and the group that decoding fills every 128 tokens. Outputs compared: the scales.

    Codes are compared bit by bit in the tests; a device of its own divides by a constant with a product (PyTorch on
    CUDA), which moves a scale by one in the last place and with it a few codes.
    """
    for batch, whole in ((1, 32_768), (8, 32_768), (32, 128)):
        tokens = scaled(whole, scale)
        for per_token in (False, True):
            for traced in (False, True):
                sizes: dict[str, Any] = {"batch": batch, "tokens": tokens, "bits": 2, "traced": traced}
                side, pool = "values" if per_token else "keys", ", outliers" if traced else ""
                yield KernelCase(
                    kernel="quantise",
                    label=f"B={batch} H={HEADS} T={tokens} D={DIM} 2 bits, {side}{pool}",
                    setup=partial(setup, per_token=per_token, **sizes),
                    providers={"pytorch": pytorch, "triton": triton},
                    bytes_moved=bytes_moved(**sizes),
                    tolerance=1e-3,
                )

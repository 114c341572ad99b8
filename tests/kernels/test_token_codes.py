"""Kernels on codes of single tokens, against the encoders and decoders of their stores and plain attention."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_interpreted import Interpreter, mostly_slow
from torch import Tensor

from kvbench.kernels import token_codes
from kvbench.kernels.devices import programs_at_once
from kvbench.kernels.references import NewTokens
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.per_token import Fp8, Fp8PerTokenHead, Int4, Int8, Nvfp4
from kvbench.policies.stores.token_codes import decode_step, decode_step_ref, encoded
from kvbench.policies.stores.turboquant import TurboQuant

STORES: dict[str, tuple[Codec, int]] = {
    "fp8": (Fp8(key_scales=(0.5,), value_scales=(2.0,)), 64),
    "fp8 odd head": (Fp8(), 24),
    "fp8 clipped": (Fp8(key_scales=(0.005,), value_scales=(0.002,)), 24),
    "fp8 per token": (Fp8PerTokenHead(), 80),
    "int8": (Int8(), 64),
    "int8 truncated": (Int8(official=True), 24),
    "int4": (Int4(), 64),
    "int4 odd head": (Int4(rotate=False), 40),
    "nvfp4": (Nvfp4(key_scales=(0.5,), value_scales=(2.0,)), 80),
    "nvfp4 clipped": (Nvfp4(key_scales=(0.001,), value_scales=(0.0002,)), 32),
    "nvfp4 four over six": (Nvfp4(group=8, four_over_six=True), 24),
    "turboquant": (TurboQuant(), 64),
    "turboquant 3 bits odd head": (TurboQuant(bits=3), 20),
    "turboquant 8 bits": (TurboQuant(bits=8), 16),
}
FAST = ("fp8 clipped", "int4", "nvfp4", "turboquant 3 bits odd head")


def step(
    name: str, dtype: torch.dtype, device: str, reference: bool = False, programs: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a decoding step over four segments, and the memory after it."""
    store, dim = STORES[name]
    torch.manual_seed(0)
    keys, values, new_keys, new_values = (2 * torch.randn(2, 2, count, dim) for count in (70, 70, 1, 1))
    queries = torch.randn(2, 6, 1, dim).to(device, dtype)
    codes = encoded(store, keys.to(dtype), 0) | encoded(store, values.to(dtype), 1)
    memory = {part: x.flatten(0, 2).to(device) for part, x in codes.items()}
    segments = torch.tensor([[0, 70], [140, 210]]), torch.tensor([[70, 69], [33, 50]])
    slots = torch.tensor([[69, 5], [32, 40]], device=device)
    new = NewTokens(new_keys.to(device, dtype), new_values.to(device, dtype), slots)
    places = torch.full((2, 1), 80), torch.randint(0, 90, (280,), dtype=torch.int32)  # some are later, so hidden
    places[1][(segments[0] + slots.cpu()).flatten()] = 80
    call: Any = (queries, new, memory, tuple(x.to(device) for x in places), tuple(x.to(device) for x in segments), 70)
    sinks = torch.randn(1, 6).to(device)
    how = AttentionParams(dim**-0.5, softcap=20.0, sliding_window=60, sinks=sinks)
    run: Any = decode_step_ref if reference else decode_step
    memory["clipped"] = clipped = torch.tensor([5, 0], device=device)
    run = partial(run, clipped=None if store.limit(0) is None else clipped)
    with patch.object(token_codes, "programs_at_once", lambda x: programs or programs_at_once(x)):
        return run(store, *call, how, True), memory


@pytest.mark.parametrize("name", mostly_slow(STORES, FAST))
def test_the_kernels_attend_to_codes_and_encode_as_the_store_does(name: str, interpret: Interpreter) -> None:
    """In one part for each segment, or in two that are joined."""
    dtype = torch.float32 if "8" in name else torch.float16
    programs = 1 if name in ("int4", "int8") else None
    out, memory = interpret(step, name=name, dtype=dtype, device="cpu", programs=programs)
    expected, stored = step(name, dtype, "cpu", reference=True)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)
    for part, x in stored.items():
        assert torch.equal(memory[part].view(torch.uint8), x.view(torch.uint8)), part
    counted = int(stored["clipped"].sum()) - 5
    assert counted > 0 if "clipped" in name else counted == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STORES)
def test_compiled_kernels_attend_to_codes_as_the_store_does(name: str, dtype: torch.dtype) -> None:
    (out, _), (expected, _) = step(name, dtype, "cuda"), step(name, dtype, "cpu", reference=True)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)

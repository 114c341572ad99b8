"""Kernels on codes in groups and a ring of exact tokens, against the definition in PyTorch."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_interpreted import Interpreter, mostly_slow
from torch import Tensor

from kvbench.kernels import group_codes
from kvbench.kernels.devices import programs_at_once
from kvbench.kernels.group_codes import Ring
from kvbench.kernels.references import NewTokens
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import form_of, group_step, group_step_ref
from kvbench.policies.stores.kivi import Kcvc, Kivi
from kvbench.policies.stores.ott import Ott

STORES: dict[str, tuple[Coding, int]] = {
    "kivi": (Kivi(group=32, residual=32), 64),
    "kivi, odd head, 8 bits": (Kivi(bits=8, group=20, residual=40), 20),
    "kivi, 4 bits, groups larger than a head": (Kivi(bits=4, group=128, residual=128), 32),
    "kcvc": (Kcvc(group=16, residual=16), 24),
    "ott, 4 bits": (Ott(bits=4, group=16, residual=8), 64),
}
FAST = "kivi", "kivi, odd head, 8 bits", "kcvc"
SLOTS = 640  # of a segment


def step(
    name: str, dtype: torch.dtype, device: str, reference: bool = False, programs: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a decoding step over four segments, and the memory and the ring after it."""
    codec, dim = STORES[name]
    torch.manual_seed(0)
    memory = {}
    for side, start in enumerate(("keys", "values")):
        form, codes = form_of(codec, side, dim), codec.encode(torch.randn(2, 2, SLOTS, dim).to(dtype), side)
        for part, shape in form.shapes.items():
            memory[f"{start} {part}"] = codes[part].flatten(0, 2).to(device)
            assert memory[f"{start} {part}"].shape == (4 * SLOTS // form.tokens, *shape)
    places = codec.most_exact + 3
    ring = Ring(*(torch.randn(2, 2, places, dim).to(device, dtype) for _ in range(2)), torch.randint(
        -1, 300, (2, 2, places), dtype=torch.int32, device="cpu").to(device))  # fmt: skip
    new = NewTokens(*torch.randn(2, 2, 2, 1, dim).to(device, dtype), torch.tensor([[1, 0], [2, 2]], device=device))
    ring.positions.scatter_(-1, new.slots[..., None], 280)
    starts, counts = torch.tensor([[0, 1], [2, 3]]) * SLOTS, torch.tensor([[200, 77], [130, 0]])
    gone = torch.where(counts > 100, counts, -1)
    where = torch.tensor([[280], [290]]), torch.randint(-1, 300, (4 * SLOTS,), dtype=torch.int32)
    how = AttentionParams(dim**-0.5, softcap=20.0, sliding_window=250, sinks=torch.randn(1, 6).to(device))
    call = ring, tuple(x.to(device) for x in where), (starts.to(device), (counts + (gone >= 0)).to(device)), SLOTS, how
    run: Any = group_step_ref if reference else group_step
    with patch.object(group_codes, "programs_at_once", lambda x: programs or programs_at_once(x)):
        out = run(codec, torch.randn(2, 6, 1, dim).to(device, dtype), new, gone.to(device), memory, *call)
    return out, memory | ring._asdict()


@pytest.mark.parametrize("name", mostly_slow(STORES, FAST))
def test_the_kernels_attend_and_encode_as_the_definition_does(name: str, interpret: Interpreter) -> None:
    """With few programs, the codes of a segment are one part."""
    dtype = torch.float32 if "8 bits" in name else torch.float16
    out, stored = interpret(step, name=name, dtype=dtype, device="cpu", programs=1 if name == "kcvc" else None)
    expected, memory = step(name, dtype, "cpu", reference=True)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)
    for part, x in memory.items():
        assert torch.equal(stored[part], x), part


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STORES)
def test_compiled_kernels_attend_and_encode_as_the_definition_does(name: str, dtype: torch.dtype) -> None:
    (out, _), (expected, _) = step(name, dtype, "cuda"), step(name, dtype, "cpu", reference=True)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)

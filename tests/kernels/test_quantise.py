"""Quantising and packing groups: by hand, against the quantiser of the stores, interpreted, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.quantise import Filled, quantise_ref, quantise_triton
from kvbench.policies.stores.quantiser import Quantiser

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")


def draw(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 2, 40, 24)) -> Tensor:
    """Tokens as a strided view; a constant head, one whose steps underflow, one far from zero with narrow groups."""
    x = torch.randn(*shape[:2], shape[2] + 3, shape[3] + 1, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 1.7
    x[0, 1] *= 1e-7
    x[1, 1] = 100 + 0.01 * x[1, 1]
    return x.to(dtype)[:, :, 1:-2, 1:]


def filled(x: Tensor, each: int) -> Filled:
    """Every seventh token is traced; a row of its own stands in."""
    traced = (torch.arange(x.shape[2]) % 7 == 3).expand(x.shape[:3])
    return Filled(traced, x.float().unflatten(2, (-1, each)).mean(3), each)


GROUPS = [(20, False), (8, False), (40, False), (12, True), (24, True)]
CALLS: dict[str, dict[str, Any]] = {
    f"{str(dtype)[6:]}-{bits}-{unit}{'-channels' if per_token else '-tokens'}{'-own' if own else ''}": {
        "x": draw(seed, dtype), "unit": unit, "per_token": per_token, "bits": bits,
        "held_in": Quantiser(bits, metadata).held_in(dtype), "arithmetic": dtype if own else torch.float32,
    }
    for seed, (dtype, bits, (unit, per_token), metadata, own) in enumerate(
        (dtype, (2, 4, 8)[i % 3], group, ("auto", "float32")[i % 2], i % 4 == 3)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for i, group in enumerate(GROUPS)
    )
}  # fmt: skip
CALLS |= {
    f"filled-{bits}-{per_token}": {
        "x": x, "unit": unit, "per_token": per_token, "bits": bits, "held_in": torch.float16, "filled": filled(x, 20)
    }
    for bits, unit, per_token in ((2, 20, False), (4, 24, True), (8, 8, True))
    for x in [draw(bits, torch.float16)]
}  # fmt: skip


def test_a_group_by_hand() -> None:
    x = torch.tensor([[[[-1.0], [2.0], [0.6], [0.5]]]])  # steps of 1 from -1: 0, 3, 1.6 -> 2, 1.5 -> 2 (halves to even)
    words, scale, minimum = quantise_ref(x, 4, False, 2, torch.float32)
    assert words.tolist() == [[[[[0b10101100]]]]]
    assert (scale.item(), minimum.item()) == (1.0, -1.0)
    traced = Filled(torch.tensor([[[True, False, False, False]]]), torch.tensor([[[[1.1]]]]), 4)
    words, scale, minimum = quantise_ref(x, 4, False, 2, torch.float32, filled=traced)
    assert words.tolist() == [[[[[0b00001101]]]]]  # 0.5 is the least now: 1.1 -> 1.2 -> 1, 2 -> 3, 0.6 -> 0.2 -> 0
    assert (scale.item(), minimum.item()) == (0.5, 0.5)


@pytest.mark.parametrize("name", CALLS)
def test_the_reference_is_the_quantiser_of_the_stores(name: str) -> None:
    call = dict(CALLS[name])
    x, unit, fill = call["x"], call["unit"], call.pop("filled", None)
    dtype = x.dtype
    if fill is not None:
        x = torch.where(fill.traced[..., None], fill.rows.repeat_interleave(fill.each, 2), x.float())
    own = call.get("arithmetic", torch.float32) == dtype and dtype != torch.float32
    metadata = "float32" if call["held_in"] == torch.float32 else "float16"
    groups = x.unflatten(3, (-1, unit)) if call["per_token"] else x.unflatten(2, (-1, unit)).transpose(-1, -2)
    expected = Quantiser(call["bits"], metadata, own).quantise(groups, dtype)
    for got, want in zip(quantise_ref(**CALLS[name]), expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_gives_the_same_bits(name: str, interpret: Interpreter) -> None:
    for got, want in zip(interpret(quantise_triton, **CALLS[name]), quantise_ref(**CALLS[name]), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_device_gives_the_same_bits(name: str) -> None:
    def there(value: Any) -> Any:
        if isinstance(value, Filled):
            return Filled(value.traced.cuda(), value.rows.cuda(), value.each)
        return value.cuda() if isinstance(value, Tensor) else value

    got = quantise_triton(**{key: there(value) for key, value in CALLS[name].items()})
    for mine, want in zip(got, quantise_ref(**CALLS[name]), strict=True):
        assert torch.equal(mine.cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_long_prompt_on_a_cuda_device_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = draw(1, dtype, (2, 8, 4096, 128))
    for per_token in (False, True):
        for bits in (2, 4, 8):
            call = {"unit": 128, "per_token": per_token, "bits": bits, "held_in": torch.float16}
            for got, want in zip(quantise_triton(x.cuda(), **call), quantise_ref(x, **call), strict=True):
                assert torch.equal(got.cpu(), want)

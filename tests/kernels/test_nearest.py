"""The nearest kept token and D2O's merge of one: kernels equal to the definition, equally near ones go to the older."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.merge_one import merge_one_ref, merge_one_triton
from kvbench.kernels.nearest import nearest_ref, nearest_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def drawn(seed: int, most: int = 80) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `nearest` and of `merge_one`; kept tokens are there twice, equal but for rounding: they tie."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    batch, heads, gone, slots, dim, wide = (
        number(1, n) for n in (3, 4, most + 1, most, 257 if seed % 4 == 0 else 65, 65)
    )
    slots, dtype = 2 * slots, DTYPES[seed % 3]
    own = normal(batch, slots // 2, heads, dim + 3).transpose(1, 2).repeat(1, 1, 2, 1).to(dtype)[..., 2:-1]
    if dtype == torch.float32:
        own *= 1 + torch.finfo(dtype).eps * torch.randint(-2, 3, own.shape, generator=random)
    present = torch.rand(batch, heads, slots, generator=random) < 0.8
    many = {"gone": normal(batch, heads, gone, dim).to(dtype), "own": own, "present": present}
    positions = torch.rand(batch, heads, slots + 1, generator=random).argsort(-1).int()[:, :, 1:]
    victims = torch.randint(0, slots, (batch, heads, 1), generator=random)
    holes = torch.rand(batch, heads, slots, generator=random) < 0.3
    stays = torch.zeros_like(holes).scatter(-1, torch.cat([victims, (victims + 1) % slots], -1), True)
    thresholds = (None, torch.full((batch, heads), torch.nan), 0.3 * normal(batch, heads))
    one = {
        "keys": own,
        "values": normal(batch, heads, slots + 1, wide).to(dtype)[:, :, 1:],
        "positions": positions.masked_fill(holes & ~stays, -1),
        "victims": victims,
        "threshold": thresholds[number(0, 3)],
        "beta": 0.7,
        "average": bool(number(0, 2)),
        "by_values": bool(number(0, 2)),
    }
    return many, one


def check_many(found: tuple[Tensor, Tensor], call: dict[str, Any], seed: object) -> None:
    """The similarity is the largest there is, and of equal ones the place is the first."""
    best, place = (x.cpu() for x in found)
    expected, first = nearest_ref(**call)
    torch.testing.assert_close(best, expected, **CLOSE, msg=lambda text: f"seed {seed}: {text}")
    chosen = call["own"].float().gather(2, place[..., None].expand(*place.shape, call["own"].shape[-1]))
    similarity = torch.nn.functional.cosine_similarity(call["gone"].float(), chosen, dim=-1, eps=1e-12)
    there = call["present"].any(-1, keepdim=True).expand_as(best)
    torch.testing.assert_close(similarity[there], expected[there], rtol=1e-4, atol=1e-4)
    half = call["own"].shape[2] // 2  # slot + half holds the same vector
    twin = call["present"].gather(-1, (place - half).clamp(min=0)) & (place >= half)
    assert not bool((twin & there).any()), f"seed {seed}: the first of two equal tokens is nearer"
    assert (place == first).float().mean() > 0.95, f"seed {seed}"


def check_one(merged: Any, call: dict[str, Any], seed: object) -> None:
    expected = merge_one_ref(**call)
    assert torch.equal(merged.nearest.cpu(), expected.nearest), f"seed {seed}"
    for name, x in expected._asdict().items():
        # New keys and values are rounded to the store's dtype once.
        rounding = torch.finfo(x.dtype).eps if x.is_floating_point() else 0
        close = {"rtol": max(1e-5, rounding), "atol": max(1e-5, rounding)}
        torch.testing.assert_close(
            getattr(merged, name).cpu(), x, **close, msg=lambda text, name=name: f"seed {seed}, {name}: {text}"
        )


def test_the_reference_merges_by_hand() -> None:
    keys = torch.tensor([[[[3.0, 4.0], [0.0, 1.0], [6.0, 8.0], [1.0, 0.0]]]])
    positions = torch.tensor([[[5, 1, 2, 0]]])
    # Of (3, 4), the others have cosines 0.8, 1 and 0.6.
    similarity, place = nearest_ref(keys[:, :, :1], keys[:, :, 1:], torch.tensor([[[True, False, True]]]))
    torch.testing.assert_close(similarity, torch.tensor([[[0.8]]]))
    assert place.tolist() == [[[0]]]
    call = (keys, keys, positions, torch.tensor([[[0]]]))
    merged = merge_one_ref(*call, threshold=torch.tensor([[0.5]]), beta=0.7, average=False)
    assert merged.nearest.tolist() == [[[2]]]
    torch.testing.assert_close(merged.similarity, torch.tensor([[[1.0]]]))
    torch.testing.assert_close(merged.key, torch.tensor([[[[4.5, 6.0]]]]))  # e / (e + e) of the way
    torch.testing.assert_close(merged.threshold, torch.tensor([[0.7 + 0.3 * 0.5]]))
    refused = merge_one_ref(*call, threshold=torch.tensor([[1.5]]), beta=0.7, average=False)
    torch.testing.assert_close(refused.key, torch.tensor([[[[6.0, 8.0]]]]))
    elsewhere = merge_one_ref(*call[:3], torch.tensor([[[2]]]), threshold=None, beta=0.7, average=True)
    assert elsewhere.nearest.tolist() == [[[0]]]
    assert math.isclose(float(elsewhere.key[0, 0, 0, 1]), 6.0)


@pytest.mark.parametrize("cases", [4, pytest.param(60, marks=pytest.mark.slow("interprets kernels"))])
def test_the_kernels_give_what_the_reference_gives(cases: int, interpret: Interpreter) -> None:
    for seed in torch.randint(0, 2**31, (cases,)).tolist():
        many, one = drawn(seed)
        check_many(interpret(nearest_triton, **many), many, seed)
        check_one(interpret(merge_one_triton, **one), one, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_gives_what_the_reference_gives() -> None:
    for seed in range(60):
        many, one = drawn(seed, 2000 if seed % 20 == 0 else 300)
        there = [{k: x.cuda() if isinstance(x, Tensor) else x for k, x in call.items()} for call in (many, one)]
        check_many(nearest_triton(**there[0]), many, seed)
        check_one(merge_one_triton(**there[1]), one, seed)

"""The group quantiser: worked numbers, the half-step bound, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.policies.stores.quantiser import Quantiser, unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def quantised(row: Tensor, quantiser: Quantiser) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and what the codes stand for."""
    held, count = quantiser.quantise(row), row.shape[-1]
    return unpack(held["words"], quantiser.bits, count), held["scale"], quantiser.dequantise(held, count)


@pytest.mark.parametrize(
    ("row", "codes", "scale", "values"),
    [
        ([1, 2, 4, 10], [0, 0, 1, 3], 3, [1, 1, 4, 10]),
        ([0, 1, 2, 6], [0, 0, 1, 3], 2, [0, 0, 2, 6]),  # 0.5 rounds to 0
        ([0, 3, 6, 6], [0, 2, 3, 3], 2, [0, 4, 6, 6]),  # 1.5 rounds to 2
        ([7, 7, 7, 7], [0, 0, 0, 0], 0, [7, 7, 7, 7]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_bits_by_hand(row: list[int], codes: list[int], scale: int, values: list[int], dtype: torch.dtype) -> None:
    got = quantised(torch.tensor(row, dtype=dtype), Quantiser(bits=2))
    assert [x.tolist() for x in got] == [codes, scale, values]


@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=40),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_number_is_off_by_more_than_half_a_step(row: list[float], bits: int, dtype: torch.dtype) -> None:
    x = torch.tensor(row, dtype=dtype)
    _, scale, values = quantised(x, Quantiser(bits=bits))
    rounding = 1e-6 * float(x.abs().max()) + 1e-30  # of scale and minimum themselves
    assert bool(((values - x).abs() <= scale / 2 + 2**bits * rounding).all())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_refused(wrong: float, dtype: torch.dtype) -> None:
    x = torch.rand(3, 8).to(dtype)
    x[1, 5] = wrong
    with pytest.raises(ValueError, match="NaN or infinity"):
        Quantiser().quantise(x)


def test_what_does_not_fit_16_bit_metadata_is_refused_in_one_sentence() -> None:
    x = torch.tensor([-131072.0, 0.0]).bfloat16()
    with pytest.raises(ValueError, match=r"up to 1.31e\+05 do not fit float16 scales and minima: use metadata=float32"):
        Quantiser().quantise(x)
    assert Quantiser(metadata="float32").quantise(x)["minimum"].item() == -131072


def test_fp16_arithmetic_is_kivis_own() -> None:
    torch.manual_seed(0)
    x = (torch.randn(500, 32) * 8).half()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 3  # all in float16, as the published code computes it
    codes = ((x - low) / scale).clamp(0, 3).round()
    got = quantised(x, Quantiser(fp16_arith=True))
    assert torch.equal(got[0].half(), codes)
    assert torch.equal(got[2], codes * scale + low)
    wide = quantised(x, Quantiser())
    assert not torch.equal(wide[2].half(), got[2])  # so the option decides something

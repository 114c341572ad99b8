"""TurboQuant: the bytes of its formula, the paper's distortion, unbiased products, and what it refuses."""

import math

import pytest
import torch
from kv_stores import feed, stream

from kvbench.policies.stores.turboquant import TurboQuant, levels


def on_the_sphere(tokens: int, dim: int, heads: int = 2) -> torch.Tensor:
    x = torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(3))
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("bits", "half"),
    [
        (1, [0.7979]),
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_levels_are_those_that_max_printed_in_1960(bits: int, half: list[float]) -> None:
    """Max, "Quantizing for minimum distortion", table I, of a normal distribution with variance 1."""
    expected = [-x for x in reversed(half)] + half
    torch.testing.assert_close(levels(bits), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-4)


@pytest.mark.parametrize(("bits", "printed"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_the_distortion_of_unit_vectors_equals_the_paper(bits: int, printed: float) -> None:
    """Theorem 1: at most sqrt(3) pi / 2 / 4^bits, and about these numbers (two digits; they are of D to infinity)."""
    x = on_the_sphere(400, 128)
    held = feed(TurboQuant(bits=bits), x, x)
    for view in (held.keys, held.values):
        error = float((view - x).square().sum(-1).mean())
        assert error <= math.sqrt(3) * math.pi / 2 / 4**bits
        assert error == pytest.approx(printed, abs=0.005 if bits > 2 else 0.01)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_sketch_makes_inner_products_unbiased_and_without_it_they_shrink(bits: int) -> None:
    """Over 200 seeds: one bit of N(0,1) shrinks products by 1 - 0.363, two by 1 - 0.117 (the paper, section 3.2)."""
    dim = 32
    x, query = on_the_sphere(1, dim, heads=1), torch.ones(dim) / math.sqrt(dim)
    exact = float(x[0, 0, 0] @ query)
    found = {
        sketch: torch.stack(
            [feed(TurboQuant(bits=bits, sketch=sketch, seed=seed), x, x).keys[0, 0, 0] @ query for seed in range(200)]
        )
        for sketch in (True, False)
    }
    spread = float(found[True].std()) / math.sqrt(200)
    assert abs(float(found[True].mean()) - exact) < 3 * spread
    if bits == 2:
        mean = float(found[False].mean())
        assert mean == pytest.approx(exact * (1 - 0.117), abs=3 * float(found[False].std()) / math.sqrt(200))


@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize(("bits", "sketch"), [(1, False), (2, False), (3, True), (3, False), (4, True), (8, False)])
def test_a_token_takes_the_bytes_of_the_formula(bits: int, sketch: bool, dim: int) -> None:
    store, x = TurboQuant(bits=bits, sketch=sketch), stream(50, heads=3, dim=dim, dtype=torch.float16)
    held, grown = feed(store, *x), feed(store, *x, [30] + [1] * 20)
    vector = dim * bits // 8
    assert held.sizes().kinds == {
        "codes": 2 * 50 * 3 * vector,
        "norms": 50 * 3 * (2 + 2 + 2 * sketch),
        "scales and minima": 0,
        "full precision": 0,
        "positions": 0,
    }
    assert held.nbytes == 50 * 3 * (2 * (vector + 2) + 2 * sketch) == grown.nbytes - grown.sizes().spare


@pytest.mark.parametrize(("bits", "share", "dim"), [(2, 0.5, 64), (2, 0.25, 128), (3, 0.5, 64), (3, 0.3, 80)])
def test_outliers_take_one_bit_more_a_norm_and_the_order_of_the_channels(bits: int, share: float, dim: int) -> None:
    store, x = TurboQuant(bits=bits, outliers=share), stream(50, heads=3, dim=dim, dtype=torch.float16)
    held, grown = feed(store, *x), feed(store, *x, [30] + [1] * 20)
    outliers = int(share * dim)
    vector = outliers * (bits + 1) // 8 + (dim - outliers) * bits // 8
    assert held.sizes().kinds == {
        "codes": 2 * 50 * 3 * vector,
        "norms": 2 * 50 * 3 * 4,
        "channels": 2 * 3 * dim * 2,
        "scales and minima": 0,
        "full precision": 0,
        "positions": 0,
    }
    assert held.nbytes == sum(held.sizes().kinds.values()) == grown.nbytes - grown.sizes().spare
    assert not store.replayable
    assert held.step_format is None


def test_the_largest_channels_of_each_head_are_coded_apart_from_the_others() -> None:
    """Head 0 has large channels 1 and 6, head 1 has 0 and 3: each set is what an instance of its own would hold."""
    large = ([1, 6], [0, 3])
    keys, values = stream(30, dim=8)
    for head, channels in enumerate(large):
        keys[:, head, :, channels] *= 50
    held = feed(TurboQuant(bits=3, outliers=0.25), keys, values)
    for head, channels in enumerate(large):
        rest = [channel for channel in range(8) if channel not in channels]
        for own, codec in ((channels, TurboQuant(bits=4, seed=1)), (rest, TurboQuant(bits=3))):
            x = keys[:, head : head + 1, :, own]
            expected = feed(codec, x, x).keys
            torch.testing.assert_close(held.keys[:, head : head + 1, :, own], expected)


def test_outlier_channels_are_those_of_the_prompt_s_kept_tokens() -> None:
    """An evicted token and the decoded ones have their energy in other channels, which do not count."""
    keys, values = stream(12, dim=8)
    keys[:, :, :, 2] *= 20
    keys[:, :, 4, 5] = 1000.0
    keys[:, :, 10:, 7] = 1000.0
    held = TurboQuant(outliers=0.125).open(keys, values, (), 1)
    held.append(keys[:, :, :10], values[:, :, :10], torch.arange(10)[None])
    held.keep((torch.arange(10) != 4).expand(1, 2, -1), 2)
    for new in (None, 10, 11):
        if new is not None:
            held.append(keys[:, :, new : new + 1], values[:, :, new : new + 1], torch.tensor([[new]]))
        held.settle()
        assert held.codec.fitted_tensors["keys channels"][0, :, 0].tolist() == [2, 2]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_one_set_empty_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"outliers={share} of 64 channels leaves no outlier, or no other channel"):
        TurboQuant(outliers=share).check_shape(2, 64)


@pytest.mark.parametrize(("wrong", "message"), [(math.nan, "NaN"), (math.inf, "infinity"), (1e5, "16 bits.*65504")])
def test_vectors_without_a_norm_in_16_bits_are_refused(wrong: float, message: str) -> None:
    keys, values = stream(8)
    keys[0, 1, 3, 5] = wrong
    with pytest.raises(ValueError, match=message):
        feed(TurboQuant(), keys, values)

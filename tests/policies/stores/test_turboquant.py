"""TurboQuant: the bytes of its formula, the paper's distortion, unbiased products, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_models import prompt, tiny
from kv_stores import attended, feed, plain_attention, stream

from kvbench import KVCache, make_policy
from kvbench.models.cache_shapes import cache_shape
from kvbench.policies.stores.turboquant import TurboQuant, from_bytes, levels, matrices, to_bytes
from kvbench.tools.cache_bytes import limit_bits, predict

LLAMA = cache_shape("llama2_7b")  # D = 128


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
def test_the_distortion_of_unit_vectors_is_what_the_paper_prints(bits: int, printed: float) -> None:
    """Theorem 1: at most sqrt(3) pi / 2 / 4^bits, and about these numbers (two digits; they are of D to infinity)."""
    x = on_the_sphere(400, 128)
    held = feed(TurboQuant(bits=bits), x, x)
    for view in (held.keys, held.values):
        error = float((view - x).square().sum(-1).mean())
        assert error <= math.sqrt(3) * math.pi / 2 / 4**bits
        assert error == pytest.approx(printed, abs=0.005 if bits > 2 else 0.01)


def test_one_coordinate_alone_is_spread_over_all_before_it_is_coded() -> None:
    keys = 50 * torch.eye(64).expand(1, 1, 64, 64)
    error = (feed(TurboQuant(bits=4), keys, keys).keys - keys).square().sum(-1).mean() / 50**2
    assert float(error) < 2 * 0.0095


def test_rotations_are_orthogonal_and_differ_by_seed() -> None:
    one, two = matrices(48, 0)[0], matrices(48, 1)[0]
    torch.testing.assert_close(one @ one.T, torch.eye(48, dtype=torch.float64))
    assert float((one - two).abs().max()) > 0.1


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
    assert held.parts() == {
        "codes": 2 * 50 * 3 * vector,
        "norms": 50 * 3 * (2 + 2 + 2 * sketch),
        "scales and minima": 0,
        "full precision": 0,
        "positions": 0,
    }
    assert held.nbytes == 50 * 3 * (2 * (vector + 2) + 2 * sketch) == grown.nbytes - grown.spare_nbytes


@pytest.mark.parametrize(("slug", "fields", "bits"), [("turboquant", {}, 4.125), ("turboquant_b2", {}, 2.125),
                                                      ("turboquant_b3", {"sketch": True}, 3 + 24 / 128)])  # fmt: skip
def test_each_further_token_takes_the_bits_of_the_formula(slug: str, fields: dict[str, bool], bits: float) -> None:
    policy = make_policy(slug, **fields)  # type: ignore[arg-type]
    assert limit_bits(policy, LLAMA) == pytest.approx(bits, abs=1e-9)


def test_a_prediction_behind_an_eviction_is_what_is_held() -> None:
    policy, model = make_policy("snapkv_turboquant_b3", 40, window=8), tiny(dtype=torch.float32)
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, policy)
    with torch.inference_mode():
        model(torch.tensor([prompt(117)]), past_key_values=cache)
    # two layers of two heads: 40 tokens with two vectors of 8 numbers in 3 bits, two norms and a position
    assert cache.nbytes - sum(layer.states[0].recent.nbytes for layer in cache.layers) == 4 * 40 * (2 * (3 + 2) + 4)
    shape = cache_shape("pocket").__class__(2, 4, 2, 8, torch.float32)
    assert predict(policy, shape, 117).nbytes == cache.held_nbytes


@pytest.mark.parametrize("dim", [8, 16, 80])
@pytest.mark.parametrize("store", [TurboQuant(bits=2), TurboQuant(bits=3), TurboQuant(bits=4, sketch=True)], ids=str)
def test_attention_over_rotated_codes_is_attention_over_the_view(store: TurboQuant, dim: int) -> None:
    keys, values = stream(130, dim=dim)
    held, query = feed(store, keys, values, [100] + [1] * 30), 3 * torch.randn(1, 6, 1, dim)
    expected = plain_attention(query, held.keys, held.values).float()
    torch.testing.assert_close(attended(held, query, 129), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(bits=st.integers(1, 8), dim=st.integers(1, 70), seed=st.integers(0, 99))
def test_packed_codes_come_back(bits: int, dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, 3, dim), dtype=torch.uint8)
    packed = to_bytes(codes, bits)
    assert torch.equal(from_bytes(packed, bits, dim), codes)
    assert packed.shape[-1] == dim * bits / 8 or dim % 8


def test_a_stream_is_coded_token_by_token_as_all_at_once() -> None:
    keys, values = stream(40)
    whole, parts = (feed(TurboQuant(bits=4, sketch=True), keys, values, splits) for splits in ([40], [7, 1, 32]))
    torch.testing.assert_close(whole.keys, parts.keys)
    torch.testing.assert_close(whole.values, parts.values)


def test_a_vector_of_zeros_stays_one() -> None:
    zeros = torch.zeros(1, 1, 3, 16)
    assert not feed(TurboQuant(bits=3, sketch=True), zeros, zeros).keys.any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e5])
def test_vectors_without_a_norm_in_16_bits_are_refused(wrong: float) -> None:
    keys, values = stream(8)
    keys[0, 1, 3, 5] = wrong
    with pytest.raises(ValueError, match=r"NaN or infinity, or their norms do not fit 16 bits \(65504\)"):
        feed(TurboQuant(), keys, values)


def test_a_sketch_needs_a_bit_beside_its_own() -> None:
    with pytest.raises(ValueError, match="bits must be a whole number of at least 2"):
        make_policy("turboquant_b1", sketch=True)

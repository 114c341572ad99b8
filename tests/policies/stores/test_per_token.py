"""The stores of serving engines: worked numbers, bytes of the formula, attention from codes, evictions before them."""

import math
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import bytes_held
from kv_stores import feed, stream
from long_cache import limit_bits
from torch import Tensor

from kvbench import KVCache, generate, make_policy
from kvbench.cache.hook import prepare
from kvbench.models.cache_shapes import cache_shape
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.per_token import Fp8, Fp8PerTokenHead, Int4, Int8, Nvfp4, from_e2m1, to_e2m1

NV_IN = [3, -1.5, 0.1, 0.125, 0.375, 0.625, 0.875, 1.25, 1.75, 2.5, 0.3, -0.2, 0, 0.6, 2.2, -2.6]
NV_OUT = [3, -1.5, 0, 0, 0.5, 0.5, 1, 1, 2, 2, 0.25, -0.25, 0, 0.5, 2, -3]
FP8_IN = [0.3, -1.7, 17, 19, 1000, 2**-9, 2**-10, 1.5 * 2**-10]
FP8_OUT = [0.3125, -1.75, 16, 20, 448, 2**-9, 0, 2**-9]
INT8_IN = [3.96875, -3.96875, 1, 0.05, -0.05, 0.046875, -0.078125, 2]
INT4_IN = [-1.25, 2.5, 0, 0.1, 0.125, -0.125, 1.3, -0.9]


@pytest.mark.parametrize(
    ("store", "x", "view", "codes"),
    [
        (Fp8(), FP8_IN, FP8_OUT, "2abe585a7e010001"),
        (Fp8(key_scales=[2.0]), [900], [896], "7e"),
        (Fp8PerTokenHead(), [3.5, -7, 0.1, 1, -2, 0.01, 5, 0], [3.5, -7, 0.1015625, 1, -2, 0.009765625, 5, 0], None),
        (Int8(), INT8_IN, [x / 32 for x in (127, -127, 32, 2, -2, 2, -2, 64)], "7f812002fe02fe40"),
        (Int8(official=True), INT8_IN, [x / 32 for x in (127, -127, 32, 1, -1, 1, -2, 64)], "7f812001ff01fe40"),
        (Int4(rotate=False), INT4_IN, [-1.25, 2.5, 0, 0, 0.25, 0, 1.25, -1], "f055561a"),
        (Nvfp4(), NV_IN, NV_OUT, "d7002244669120f6"),
        (Nvfp4(key_scales=[1 / 16]), NV_IN, NV_OUT, "d7002244669120f6"),
        (Nvfp4(), [0.005] * 16, [0] * 16, "00" * 8),
        (Nvfp4(), [3000] * 16, [2688] * 16, "77" * 8),
        (Nvfp4(), [0] * 16, [0] * 16, "00" * 8),
    ],
    ids=str,
)
def test_a_vector_worked_by_hand(store: Codec, x: list[float], view: list[float], codes: str | None) -> None:
    keys = torch.tensor(x, dtype=torch.float32).view(1, 1, 1, -1)
    held = feed(store, keys, keys)
    assert held.keys.flatten().tolist() == view
    if codes is not None:
        assert bytes(held.memory["keys codes"].flatten().view(torch.uint8).tolist()).hex() == codes


@pytest.mark.parametrize("splits", [None, [20] + [1] * 4])
@pytest.mark.parametrize(("store", "largest"), [(Fp8, 448), (Nvfp4, 2688)])
def test_numbers_beyond_a_fixed_scale_are_counted(store: Any, largest: int, splits: list[int] | None) -> None:
    keys, values = stream(24, heads=3, dim=32, dtype=torch.float32)
    most = [float(x.abs().max()) for x in (keys, values)]
    held = feed(store(key_scales=[most[0] / largest], value_scales=[most[1] / largest]), keys, values, splits)
    assert held.clipped == 0, "calibrated on these numbers"
    held = feed(store(key_scales=[most[0] / largest / 2], value_scales=[most[1] / largest / 3]), keys, values, splits)
    assert held.clipped == int((keys.abs() > most[0] / 2).sum() + (values.abs() > most[1] / 3).sum()) > 0


def test_scales_that_follow_the_numbers_clip_none() -> None:
    keys = 1e6 * torch.randn(1, 2, 5, 32)
    for store in (Fp8PerTokenHead(), Int8(), Int4()):
        assert feed(store, keys, keys).clipped is None


def test_e2m1_rounds_to_the_nearest_of_its_numbers_and_ties_to_the_even_code() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    x = torch.linspace(0, 8, 4001)
    for value, code in zip(x.tolist(), to_e2m1(x).tolist(), strict=True):
        best = min(abs(value - number) for number in numbers)
        near = [c for c, number in enumerate(numbers) if abs(value - number) == best]
        assert code in near
        assert len(near) == 1 or code % 2 == 0
    assert from_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [*numbers, *(-number for number in numbers)]


def test_four_over_six_never_has_the_larger_error_and_sometimes_the_smaller() -> None:
    keys, _ = stream(200, dim=16)
    plain, chosen = ((feed(Nvfp4(four_over_six=on), keys, keys).keys - keys).square().sum(-1) for on in (False, True))
    assert bool((chosen <= plain + 1e-6).all())
    assert float(chosen.sum()) < float(plain.sum())


@pytest.mark.parametrize(
    ("name", "number_bytes", "per_layer"),
    [("fp8", 256, 8), ("fp8_per_token_head", 264, 0), ("int8", 264, 0), ("int4", 136, 0), ("nvfp4", 144, 8)],
)
def test_bytes_are_those_of_the_formula(name: str, number_bytes: int, per_layer: int) -> None:
    store = make_policy(name).store
    whole, grown = (
        feed(store, *stream(50, heads=3, dim=128, dtype=torch.bfloat16), splits) for splits in (None, [30] + [1] * 20)
    )
    assert whole.nbytes == sum(whole.sizes().kinds.values()) == bytes_held(whole) == 50 * 3 * number_bytes + per_layer
    assert grown.nbytes - grown.sizes().spare == whole.nbytes
    assert limit_bits(make_policy(name), cache_shape("llama2_7b")) == pytest.approx(8 * number_bytes / 256)


def test_rotation_spreads_one_large_channel_over_all() -> None:
    keys, _ = stream(64, dim=64)
    keys[..., 7] *= 40
    errors = [float((feed(Int4(rotate=on), keys, keys).keys - keys).norm()) for on in (True, False)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize(
    ("eviction", "store", "vectors"),
    [
        *(("snapkv", *store) for store in (("fp8", 16), ("int8", 24), ("int4", 16), ("nvfp4", 10), ("turboquant", 12))),
        *((eviction, "int8", 24) for eviction in ("h2o", "ada_snapkv", "streamingllm")),
    ],
)
def test_evicting_while_decoding_frees_single_tokens_and_leaves_the_codes_of_the_others(
    eviction: str, store: str, vectors: int
) -> None:
    """12 more tokens, one evicted for each. vectors: bytes of a key and a value of 8 numbers by the formula."""
    model, ids = prepare(tiny("llama", dtype=torch.float32)), torch.tensor([prompt(72)])
    fields: dict[str, Any] = {"window": 8} if "snapkv" in eviction else {}
    fields |= {"store.group": 8} if store == "nvfp4" else {}
    cache = KVCache(model.config, make_policy(f"{eviction}_{store}", 40, decode="evict", **fields), prompt_length=60)
    known: dict[tuple[int, int, int], list[Tensor]] = {}
    with torch.inference_mode():
        for call in ids.split([60] + [1] * 12, dim=1):
            model(call, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                held = layer.states[0].store
                coded = [x for name, x in held.memory.items() if name.startswith(("keys ", "values "))]
                for head, slot in (held.positions[0] >= 0).nonzero().tolist():
                    own = [x[0, head, slot].flatten().view(torch.uint8).clone() for x in coded]
                    before = known.setdefault((index, head, int(held.positions[0, head, slot])), own)
                    assert all(map(torch.equal, before, own))
                per_slot = vectors + 4 + 4 * (eviction == "h2o")  # position, sum of attention
                tokens = int((held.positions >= 0).sum())
                constants = 2 * 4 * (store in ("fp8", "nvfp4")) + 2 * 8 * (held.free is not None)
                assert held.nbytes - held.sizes().spare == tokens * per_slot + constants
                assert held.nbytes == sum(held.sizes().kinds.values())
                assert tokens == 40 * 2
    cache.audit()
    assert cache.layers[0].positions.max() == 71
    assert len(known) == 2 * 2 * (40 + 12)


def test_stores_that_do_not_fit_a_model_are_refused() -> None:
    """A cache refuses a store that does not fit its model before a token is stored, in every way to use it."""
    model, ids = prepare(tiny("llama", dtype=torch.float32)), torch.tensor([prompt(8)])
    for slug, fields, sentence in (
        ("fp8", {"key_scales": [1.0]}, "must be empty or hold 2 numbers"),
        ("nvfp4", {"value_scales": [1.0] * 3}, "must be empty or hold 2 numbers"),
        ("h2o_fp8", {"key_scales": [1.0] * 3}, "must be empty or hold 2 numbers"),
        ("ott", {"skip_layers": [2]}, "skip_layers=2 is not allowed: the model has attention layers 0 to 1"),
        ("gemfilter", {"layer": 7}, "the model has"),
        ("nvfp4", {}, "group=16 does not divide the head dimension 8"),
        ("nvfp4", {"group": 3}, "group=3 does not divide the head dimension 8"),
        ("kivi", {"group": 3, "residual": 0}, "group=3 does not divide the head dimension 8"),
    ):
        policy = make_policy(slug, 64, **fields)
        with pytest.raises(ValueError, match=sentence):
            generate(model, ids, policy, max_new_tokens=2)
        if slug != "gemfilter":
            with pytest.raises(ValueError, match=sentence):
                model(ids, past_key_values=KVCache(model.config, policy))
    for store, dim in ((Nvfp4(), 24), (Nvfp4(), 8), (Int4(), 80), (Int4(), 24)):
        with pytest.raises(ValueError, match=f"head dimension .*{dim}"):
            store.check_shape(2, dim)
    keys, values = stream(8)
    keys[0, 1, 3, 5] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        feed(Fp8(), keys, values)


@pytest.mark.parametrize(("slug", "family"), [("h2o", "gemma3n"), ("random", "llama"), ("caote_tova", "llama")])
def test_a_prompt_attends_to_exact_tokens_whatever_the_order_of_eviction_and_attention(slug: str, family: str) -> None:
    """In gemma3n, later layers attend to the tokens of an earlier one; the next token attends to codes."""
    model, ids = prepare(tiny(family, dtype=torch.float32)), torch.tensor([prompt(41)])
    for block in (None, 8):
        logits = []
        for store in ("", "_fp8", "_int8"):
            how: dict[str, Any] = {"schedule": "prompt"} if block is None else {"block": block}
            cache = KVCache(model.config, make_policy(slug + store, 20, order="evict_then_attend", **how))
            logits.append([model(part, past_key_values=cache).logits for part in ids.split([40, 1], dim=1)])
            cache.audit()
        for coded in logits[1:]:
            assert torch.equal(coded[0], logits[0][0])
            assert not torch.allclose(coded[1], logits[0][1], rtol=1e-4)

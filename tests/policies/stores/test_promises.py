"""Laws of all stores but the dense ones: attention from codes, bytes, batches, families, evictions before them."""

from itertools import cycle

import pytest
import torch
from kv_models import prompt, tiny
from kv_presets import SMALL_GROUPS, STORES
from kv_runs import bytes_held
from kv_stores import attended, feed, plain_attention, stream
from parameters import few_fast
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.stores.gear import Gear
from kvbench.policies.stores.kivi import GroupCodec, Kcvc, Kivi
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.per_token import Fp8, Fp8PerTokenHead, Int4, Int8, Nvfp4
from kvbench.policies.stores.store import Store
from kvbench.policies.stores.zipcache import ZipCache

ATTENDING = [
    *(Kivi(bits=bits, group=group, residual=32 * (group == 32)) for bits in (2, 4, 8) for group in (32, 64, 128)),
    *(Kcvc(group=32, residual=64), Kcvc(group=32, residual=0), Kcvc(group=None, residual=50)),
    *(Ott(group=32), Ott(group=32, residual=0, outliers=6), Ott(group=64, pool_scope="layer")),
    *(Gear(group=32), Gear(group=64, outlier_ratio=0.1, rank=4), Gear(group=16, bits=4), Gear(group=4, bits=8)),
    *(ZipCache(), Fp8(), Fp8PerTokenHead(), Int8(), Int4(), Int4(rotate=False), Nvfp4(), Nvfp4(four_over_six=True)),
]


@pytest.mark.parametrize(("store", "dim"), [*zip(ATTENDING, cycle((16, 64)))], ids=str)
def test_attention_from_codes_is_attention_over_the_dequantised_view(store: Store, dim: int) -> None:
    keys, values = stream(330, dim=dim)
    queries = 3 * torch.randn(1, 6, 330, dim)
    fed = queries if isinstance(store, ZipCache) else None
    held, newest = feed(store, keys, values, [170] + [1] * 160, queries=fed), queries[:, :, -1:]
    expected = plain_attention(newest, held.keys, held.values).float()
    torch.testing.assert_close(attended(held, newest, 329), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("store", "most"), [(Kivi(), 127), (Ott(), 159), (Gear(), 127), (Kcvc(), 127)], ids=str)
def test_a_prompt_stays_exact_until_a_group_is_full(store: GroupCodec, most: int) -> None:
    keys, values = stream(most)
    held = feed(store, keys, values)
    assert torch.equal(held.keys, keys)
    assert torch.equal(held.values, values)
    assert held.sizes().kinds["codes"] == 0
    assert feed(store, *stream(most + 1)).sizes().kinds["codes"] > 0


def check_bytes(cache: KVCache) -> None:
    for layer in cache.layers:
        held = layer.states[0].store
        assert held.nbytes == sum(held.sizes().kinds.values()) == bytes_held(held)


def test_zipcaches_probes_are_counted_while_the_prompt_comes_in(model: PreTrainedModel) -> None:
    cache = KVCache(model.config, make_policy("zipcache"), prompt_length=100)
    ids = torch.tensor([prompt(100)])
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=cache)
        check_bytes(cache)
        before = cache.layers[0].nbytes
        assert before == 40 * 2 * (2 * 8 * 8 + 4 + 8) + 10 * 8  # keys, values, positions, saliency; ten probes
        model(ids[:, 40:], past_key_values=cache)
    check_bytes(cache)


@pytest.mark.parametrize("name", SMALL_GROUPS)
def test_eight_bits_decode_nearly_as_the_full_cache(model: PreTrainedModel, name: str) -> None:
    ids = torch.tensor([prompt(90)])
    outputs = []
    for policy in (make_policy("full"), make_policy(name, **STORES[name], bits=4 if name == "zipcache" else 8)):
        cache = KVCache(model.config, policy)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            outputs.append(
                torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(20)], dim=1)
            )
        cache.audit()
    assert 0 < float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < (0.3 if name == "zipcache" else 0.05)


@pytest.mark.parametrize("name", ["kivi", "ott", "kcvc", "gear"])
def test_decoding_in_one_call_or_token_by_token_is_the_same(model: PreTrainedModel, name: str) -> None:
    ids = torch.tensor([prompt(90)])
    caches = []
    for calls in ([90], [50, 30, 10], [50] + [1] * 40):
        cache = KVCache(model.config, make_policy(name, **STORES[name], bits=8), prompt_length=50)
        cache.sequence.takes_several = True
        start = 0
        with torch.inference_mode():
            for size in calls:
                model(ids[:, start : start + size], past_key_values=cache)
                start += size
        caches.append(cache)
    # What a token attends to in a call of several depends on the call; layer 0 has the same keys in any case.
    for cache in caches[1:]:
        torch.testing.assert_close(cache.layers[0].keys, caches[0].layers[0].keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(cache.layers[0].values, caches[0].layers[0].values, rtol=1e-9, atol=1e-9)


PAIRS = [(eviction, "kivi") for eviction in ("h2o", "cake", "d2o")]
PAIRS += [("ada_snapkv", store) for store in ("ott", "kcvc", "fp8_per_token_head")]
PAIRS += [("snapkv", store) for store in STORES] + [("caote_snapkv", "ott"), ("caote_snapkv", "zipcache")]
FAST = ("snapkv", "gear"), ("snapkv", "int8"), *(pair for pair in PAIRS if pair[0] != "snapkv")


@pytest.mark.parametrize("pair", few_fast(PAIRS, FAST, pytest.mark.slow("runs every store")), ids="_".join)
def test_tokens_kept_by_an_eviction_are_stored_in_codes(model: PreTrainedModel, pair: tuple[str, str]) -> None:
    eviction, store = pair
    fields = {"window": 8} if eviction in ("snapkv", "caote_snapkv", "cake", "pyramidkv", "ada_snapkv") else {}
    fields |= {"block": 16} if eviction == "caote_snapkv" else {}
    fields |= {"decode": "grow"}
    policy = make_policy(f"{eviction}_{store}", 40, **fields, **{f"store.{k}": v for k, v in STORES[store].items()})
    dense = make_policy(eviction, 40, **fields)
    ids = torch.tensor([prompt(120)])
    held = [generate_tokens(model, ids, p, max_new_tokens=1).cache for p in (dense, policy)]
    grown = generate_tokens(
        model, ids, policy, max_new_tokens=25
    ).cache  # audited: no more than the budget and what was decoded
    for plain, quantised, later in zip(held[0].layers, held[1].layers, grown.layers, strict=True):
        order = plain.positions.masked_fill(plain.positions < 0, 10**6).argsort(-1)  # the ragged store pads in between
        count = quantised.positions.shape[2]
        assert torch.equal(plain.positions.gather(-1, order)[..., :count], quantised.positions)
        assert torch.equal(
            later.positions[..., :count][quantised.positions >= 0], quantised.positions[quantised.positions >= 0]
        )
        keys = plain.keys.gather(2, order[..., None].expand_as(plain.keys))[:, :, :count]
        there = (quantised.positions >= 0)[..., None]
        error = (quantised.keys - keys) * there
        assert float(error.norm() / (keys * there).norm()) < 0.6
        assert bool(error.any()) == (count >= 13)  # fewer survivors than a group and a residual stay exact


@pytest.mark.parametrize(("name", "dtype"), [*zip(STORES, cycle([torch.float16, torch.bfloat16]))], ids=str)
def test_models_of_16_bits_decode_through_every_store(name: str, dtype: torch.dtype) -> None:
    model = prepare(tiny("llama", dtype=dtype))
    ids = torch.tensor([prompt(64)])
    cache = generate_tokens(model, ids, make_policy(name, **STORES[name]), max_new_tokens=12).cache
    assert cache.layers[0].keys.dtype == dtype
    assert cache.held_nbytes < 2 * (64 + 11) * 2 * (2 * 8 * 2 + 4), "a position and 16 numbers of 2 bytes"
    check_bytes(cache)

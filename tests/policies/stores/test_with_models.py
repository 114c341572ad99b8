"""Stores inside a model's cache: batches, families, evictions in front of them, and what is refused."""

from typing import Any

import pytest
import torch
from kv_models import left_padded, prompt, tiny
from kv_runs import bytes_held
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.inference.generate import greedy

STORES: dict[str, dict[str, Any]] = {
    "kivi": {"group": 8, "residual": 16},
    "ott": {"group": 8, "residual": 5, "auxiliary": 4, "skip_layers": [0]},
    "kcvc": {"group": 8, "residual": 8},
    "gear": {"group": 8, "gap": 12},
    "zipcache": {"gap": 12},
}
LENGTHS = (50, 31, 9)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Grouped queries; gemma2 adds sliding windows (24 tokens) and soft-capped logits."""
    return prepare(tiny(request.param))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return prepare(tiny("llama"))


@pytest.mark.parametrize("name", [*STORES, "kcvc_whole"])
def test_a_padded_batch_comes_out_as_its_rows_alone(model: PreTrainedModel, name: str) -> None:
    fields = {"group": None, "residual": 8} if name == "kcvc_whole" else STORES[name]
    policy = make_policy(name.removesuffix("_whole"), **fields)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    alone = [
        greedy(model, torch.tensor([p]), policy, max_new_tokens=new)
        for p, new in zip(prompts, (20, 7, 20), strict=True)
    ]
    ids, mask = left_padded(prompts)
    together = greedy(  # the second row stops early, and then no longer grows
        model, ids, policy, attention_mask=mask, max_new_tokens=20, stop=lambda tokens: tokens == alone[1].tokens[0]
    )
    assert together.tokens == [one.tokens[0] for one in alone]
    for layer, held in enumerate(together.cache.layers):
        assert (held.positions < 0).any()
        for row, one in enumerate(alone):
            count = one.cache.layers[layer].positions.shape[2]
            assert torch.equal(held.positions[row, :, :count], one.cache.layers[layer].positions[0])
            for x in ("keys", "values"):
                expected = getattr(one.cache.layers[layer], x)[0]
                torch.testing.assert_close(getattr(held, x)[row, :, :count], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STORES)
def test_eight_bits_decode_nearly_as_the_full_cache(model: PreTrainedModel, name: str) -> None:
    ids = torch.tensor([prompt(90)])
    outputs = []
    for policy in (make_policy("full"), make_policy(name, **STORES[name], bits=4 if name == "zipcache" else 8)):
        cache = KVCache(model.config, policy)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            outputs.append(
                torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(30)], dim=1)
            )
        cache.audit()
    assert 0 < float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < (0.3 if name == "zipcache" else 0.05)


class Given(KVCache):
    """What follows the prompt is given, and comes several tokens at once."""

    _teacher_forced = True


@pytest.mark.parametrize("name", ["kivi", "ott", "kcvc", "gear"])
def test_decoding_in_one_call_or_token_by_token_is_the_same(model: PreTrainedModel, name: str) -> None:
    ids = torch.tensor([prompt(90)])
    caches = []
    for calls in ([90], [50, 30, 10], [50] + [1] * 40):
        cache = Given(model.config, make_policy(name, **STORES[name], bits=8), prompt_length=50)
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


PAIRS = [(eviction, "kivi") for eviction in ("h2o", "streamingllm", "tova", "cake", "pyramidkv", "d2o")]
PAIRS += [("ada_snapkv", store) for store in ("kivi", "ott", "kcvc")]
PAIRS += [("snapkv", store) for store in STORES] + [("caote_snapkv", "ott"), ("caote_snapkv", "zipcache")]


@pytest.mark.parametrize(("eviction", "store"), PAIRS)
def test_what_an_eviction_keeps_is_what_is_stored_in_codes(llama: PreTrainedModel, eviction: str, store: str) -> None:
    fields = {"window": 8} if eviction in ("snapkv", "caote_snapkv", "cake", "pyramidkv", "ada_snapkv") else {}
    fields |= {"block": 16} if eviction == "caote_snapkv" else {}
    policy = make_policy(f"{eviction}_{store}", 40, **fields, **{f"store.{k}": v for k, v in STORES[store].items()})
    dense = make_policy(eviction, 40, decode="grow", **fields)
    ids = torch.tensor([prompt(120)])
    held = [greedy(llama, ids, p, max_new_tokens=1).cache for p in (dense, policy)]
    grown = greedy(llama, ids, policy, max_new_tokens=25).cache  # audited: no more than the budget and what was decoded
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


def test_a_prompt_in_several_calls_is_quantised_once_it_is_in(llama: PreTrainedModel) -> None:
    policy = make_policy("caote_snapkv_kivi_g32_r32", 64, window=8, **{"store.group": 8, "store.residual": 8})
    cache = KVCache(llama.config, policy, prompt_length=120)
    ids, held = torch.tensor([prompt(120)]), []
    with torch.inference_mode():
        for start in (0, 60):
            llama(ids[:, start : start + 60], past_key_values=cache)
            held.append(cache.nbytes)
    assert held[1] < held[0] / 2


def test_a_short_prompt_answers_exactly_as_the_full_cache(llama: PreTrainedModel) -> None:
    ids = torch.tensor([prompt(60)])
    full = greedy(llama, ids, make_policy("full"), max_new_tokens=40)
    for name in ("kivi", "ott", "kcvc"):
        short = greedy(llama, ids, make_policy(name), max_new_tokens=40)
        assert short.tokens == full.tokens
        for layer, expected in zip(short.cache.layers, full.cache.layers, strict=True):
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)


@pytest.mark.parametrize(
    ("slug", "fields", "sentence"),
    [
        ("snapkv_kivi", {"decode": "evict"}, "cannot give one up: use decode=grow"),
        ("snapkv_ott", {"pool_scope": "layer"}, "heads cannot share traced ones: use pool_scope=head"),
        ("ada_snapkv_gear", {}, "gear's value groups span all KV heads"),
        ("ada_snapkv_zipcache", {}, "zipcache's value scales span all KV heads"),
        ("ada_snapkv_kcvc", {"group": None}, "kcvc with group=null cannot hold: set a group"),
    ],
)
def test_compositions_without_meaning_are_refused_when_built(slug: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_policy(slug, 64, **fields)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", STORES)
def test_models_of_every_dtype_decode_through_every_store(name: str, dtype: torch.dtype) -> None:
    model = prepare(tiny("llama", dtype=dtype))
    ids = torch.tensor([prompt(64)])
    cache = greedy(model, ids, make_policy(name, **STORES[name]), max_new_tokens=20).cache
    assert cache.layers[0].keys.dtype == dtype
    full = greedy(model, ids, make_policy("full"), max_new_tokens=20).cache
    assert cache.nbytes < full.nbytes
    for layer in cache.layers:
        assert layer.nbytes == sum(layer.states[0].store.parts().values()) == bytes_held(layer.states[0].store)

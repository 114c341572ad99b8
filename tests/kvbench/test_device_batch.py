"""Decoding of all dense sequences at once, as on a GPU, equals decoding group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from torch import Tensor

from kvbench import KVCache, make_policy
from kvbench.cache import cache as cache_module
from kvbench.engine import batch as engine
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.logits import next_logits
from kvbench.engine.prefill import prefill
from kvbench.engine.sequence import Request
from kvbench.policies.policy import Policy

BUDGETS = (40, 56)
SEVERAL = ("h2o", "tova", "caote_snapkv", "full", "ada_snapkv", "snapkv", "d2o", "kvec", "cake", "streamingllm")


def policies(slugs: Sequence[str], budgets: Sequence[int] = BUDGETS) -> list[Policy]:
    windows = {slug: {"window": 6} if "snapkv" in slug else {} for slug in slugs}
    return [make_policy(slug, budget, **windows[slug]) for slug in slugs for budget in budgets]


def model_of(family: str = "llama", **sizes: Any) -> Any:
    model = tiny(family, dtype=torch.float32, **sizes)
    model.set_attn_implementation("kvbench")
    return model


def asked(length: int, seed: int, new: int) -> Request:
    return Request(torch.tensor([prompt(length, seed)]), new)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches decode at once, and no number is read back from the device."""
    monkeypatch.setattr(engine, "use_triton", lambda x: True)
    monkeypatch.setattr("kvbench.policies.scorers.roco.on_host", lambda x: False)
    monkeypatch.setattr("kvbench.cache.eviction.READ_AT_ONCE", ())


def decoded(model: Any, some: Sequence[Policy]) -> list[Any]:
    """What every sequence of two examples is in the end; the second joins later and ends earlier."""
    flight, rows = DecodeBatch(model), []
    for seed, length, new in ((1, 90, 20), (2, 71, 9)):
        rows += flight.admit(asked(length, seed, new), some)
        flight.step()
    while flight.in_flight:
        flight.step()
    return [(row.error, row.tokens, *held(row.cache)) for row in rows]


def held(cache: KVCache | None) -> tuple[Any, ...]:
    assert cache is not None
    positions = [layer.positions.sort(-1).values.tolist() for layer in cache.layers]
    counts = [state.counts for layer in cache.layers for state in layer.states]
    return positions, counts, cache.nbytes, cache.peak_nbytes, cache.spare_nbytes


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("slugs", [SEVERAL, ("sirllm", "cam", "random"), ("tova", "kivi", "caote_tova")])
def test_every_sequence_is_what_it_is_group_by_group(
    slugs: Sequence[str], family: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, some = model_of(family), policies(slugs)
    if "random" in slugs:  # beside others that evict layer by layer
        some += [make_policy("kvec", budget, window=6, decode="evict") for budget in BUDGETS]
    opened: list[int] = []
    made = cache_module.DeviceBatch
    monkeypatch.setattr(cache_module, "DeviceBatch", lambda groups: (opened.append(len(groups)), made(groups))[1])
    together = decoded(model, some)
    assert opened, "batches were taken at once"
    monkeypatch.setattr(engine, "use_triton", lambda x: False)
    assert together == decoded(model, some)


@pytest.mark.parametrize("slugs", [("h2o", "tova", "caote_snapkv"), ("streamingllm", "knorm", "snapkv", "full")])
def test_sequences_below_their_budget_decode_in_the_same_launches(
    slugs: Sequence[str], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 90 and 71 tokens, budgets of 40, 96 and 120: some sequences reach their budget on the way."""
    model, some = model_of(), policies(slugs, (40, 96, 120))
    joined: list[int] = []
    made = cache_module.DeviceBatch
    monkeypatch.setattr(cache_module, "DeviceBatch", lambda groups: (joined.append(len(groups)), made(groups))[1])
    groups = KVCache.on_device

    def all_join(cache: KVCache, wanted: bool = True) -> Any:
        found = groups(cache, wanted)
        assert not wanted or found is None or len(found.groups) == len(cache.groups)
        return found

    monkeypatch.setattr(KVCache, "on_device", all_join)
    together = decoded(model, some)
    assert joined, "batches were taken at once"
    monkeypatch.setattr(engine, "use_triton", lambda x: False)
    assert together == decoded(model, some)


def test_a_cache_may_leave_the_device_between_any_two_tokens() -> None:
    model, policy = model_of(), make_policy("caote_snapkv", 40, window=6)
    found = []
    for switches in (False, True):
        cache = KVCache(model.config, policy, prompt_length=60)
        with torch.inference_mode():
            logits, tokens = prefill(model, torch.tensor([prompt(60)]), cache), []
            for index in range(14):
                if switches:
                    cache.on_device(index % 5 < 3)
                tokens.append(logits.argmax(-1, keepdim=True))
                logits = next_logits(model, tokens[-1], torch.tensor([[60 + index]]), cache)
        cache.on_device(False)
        cache.audit()
        found.append(([int(token) for token in tokens], *held(cache)))
    assert found[0] == found[1]


def test_the_attention_sums_of_h2o_are_those_of_the_plain_path(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = model_of(), []
    for device in (True, False):
        monkeypatch.setattr(engine, "use_triton", lambda x, device=device: device)
        flight = DecodeBatch(model)
        rows = [row for seed in (1, 2) for row in flight.admit(asked(90, seed, 16), policies(("h2o",)))]
        while flight.in_flight:
            flight.step()
        found.append([sums(row.cache) for row in rows])
    torch.testing.assert_close(*found)


def sums(cache: KVCache | None) -> list[Tensor]:
    """What attention each token of every layer drew, in the order of their positions, [1,H,T,1]."""
    assert cache is not None
    stores = [layer.states[0].store for layer in cache.attention_layers]
    places = [store.positions.argsort(-1)[..., None] for store in stores]
    return [store.state["attention_sum"].gather(2, order) for store, order in zip(stores, places, strict=True)]

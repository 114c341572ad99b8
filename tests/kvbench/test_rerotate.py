"""Keys that are rotated anew: what is kept reads as if it stood at 0, 1, ... and later tokens right behind it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_models import prompt, rotated, tiny
from kv_runs import kept_now
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy

LENGTH, BUDGET, NEW = 60, 20, 5
IDS = torch.tensor([prompt(LENGTH + NEW)])


@torch.inference_mode()
def compacted(model: PreTrainedModel, kept: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Logits of NEW tokens at b, b + 1, ... behind the kept [layer][head] at 0, ..., b - 1, in transformers' cache."""
    model.set_attn_implementation("sdpa")
    full, short = DynamicCache(), DynamicCache()
    model(IDS[:, :LENGTH], past_key_values=full)
    for layer, heads in enumerate(kept):
        keys, values = full.layers[layer].keys, full.layers[layer].values
        assert keys is not None
        own = [
            torch.stack([rotated(keys[0, h, p], rank - p) for rank, p in enumerate(head)])
            for h, head in enumerate(heads)
        ]
        short.update(
            torch.stack(own)[None], torch.stack([values[0, h, list(x)] for h, x in enumerate(heads)])[None], layer
        )
    return torch.cat([model(IDS[:, LENGTH + t : LENGTH + t + 1], past_key_values=short).logits for t in range(NEW)], 1)


@torch.inference_mode()
def ours(model: PreTrainedModel, slug: str, cut: Sequence[int] = (LENGTH,), **fields: Any) -> tuple[Tensor, KVCache]:
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy(slug, BUDGET, **{"rerotate": True, **fields}), prompt_length=LENGTH)
    for part in IDS[:, :LENGTH].split(list(cut), dim=1):
        model(part, past_key_values=cache)
    return torch.cat(
        [model(IDS[:, LENGTH + t : LENGTH + t + 1], past_key_values=cache).logits for t in range(NEW)], 1
    ), cache


@pytest.mark.parametrize(
    ("slug", "fields", "cut"), [("snapkv", {"window": 8}, [LENGTH]), ("knorm", {"decode": "grow"}, [23, 37])]
)
def test_kept_tokens_stand_at_the_first_places_and_later_ones_follow(
    slug: str, fields: dict[str, Any], cut: list[int]
) -> None:
    model = tiny()
    logits, cache = ours(model, slug, cut, **fields)
    kept = [[[p for p in head if p < LENGTH] for head in layer] for layer in kept_now(cache)[0]]
    assert all(len(head) == BUDGET for layer in kept for head in layer)
    torch.testing.assert_close(logits, compacted(model, kept), rtol=1e-4, atol=1e-4)  # cos and sin are float32
    away = [max(abs(p - rank) for rank, p in enumerate(head)) for layer in kept for head in layer]
    assert max(away) > 10


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_behind_kvpress_with_its_keys_rotated_anew(family: str) -> None:
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    model = tiny(family, dtype=torch.float32)
    press = kvpress.KeyRerotationPress(press=kvpress.KnormPress(compression_ratio=1 - (BUDGET + 0.5) / LENGTH))
    with torch.inference_mode():
        cache = DynamicCache()
        with press(model):
            model(IDS[:, :LENGTH], past_key_values=cache, cache_position=torch.arange(LENGTH))  # which presses ask for
        theirs = [model(IDS[:, LENGTH + t : LENGTH + t + 1], past_key_values=cache).logits for t in range(NEW)]
    logits, _ = ours(model, "knorm", decode="grow")
    torch.testing.assert_close(logits, torch.cat(theirs, dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("store", ["zipcache", "think"])
def test_rerotation_changes_nothing_where_no_token_is_evicted(store: str) -> None:
    turned, plain = (ours(tiny(), store, rerotate=rerotate)[0] for rerotate in (True, False))
    assert torch.equal(turned, plain)


@torch.inference_mode()
def test_rotated_keys_are_rotated_again_by_a_second_prompt() -> None:
    model = tiny()
    _, cache = ours(model, "knorm", decode="grow")
    cache.next_prompt(20)
    model(torch.tensor([prompt(20, seed=3)]), past_key_values=cache)
    seen, store = LENGTH + NEW + 20, cache.layers[0].states[0].store
    places = store.positions + store.state["moved"][..., 0]
    assert places[0].tolist() == [[float(p) for p in range(seen - BUDGET, seen)]] * 2


@pytest.mark.parametrize(
    ("family", "slug", "fields", "sentence"),
    [
        ("mistral", "snapkv", {"window": 8}, "the model's sliding window hides tokens by their original position"),
        ("llama", "cake", {"window": 8}, "but the allocator of cake evicts no layer"),
        ("llama", "tova", {"order": "evict_then_attend"}, "rerotate=true needs order=attend_then_evict"),
        ("llama", "tova", {"rerotate": 1.5}, "rerotate must be true or false, got 1.5"),
    ],
)
def test_rerotation_is_refused_where_keys_cannot_be_rotated(
    family: str, slug: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        ours(tiny(family), slug, **{"rerotate": True, **fields})

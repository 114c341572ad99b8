"""Wrappers around scorers that ask for the model's layer or remember: the laws of every preset hold for them too."""

from pathlib import Path

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import run_greedy
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.inference.prefill import prefill

LENGTH, BUDGET, NEW = 56, 40, 4
SLUGS = [
    *("ada_expected_attention", "caote_keydiff", "critical_expected_attention", "caote_expected_attention"),
    *("ada_compactor", "ada_critical_lagkv", "critical_leverage"),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.mark.parametrize("slug", SLUGS)
def test_the_budget_holds_and_rows_keep_what_they_keep_alone(model: PreTrainedModel, slug: str) -> None:
    policy, ids = make_policy(slug, BUDGET), [prompt(LENGTH), prompt(LENGTH - 9, seed=1)]
    batch = run_greedy(model, ids, policy, NEW)
    for row, own in enumerate(ids):
        alone = run_greedy(model, [own], policy, NEW)
        assert batch.of_row(row)[-NEW:] == alone.of_row(0)[-NEW:]
        for call, kept in enumerate(alone.of_row(0)):
            generated = call if policy.schedule.decode == "grow" else 0
            assert sum(len(head) for layer in kept for head in layer) == (BUDGET + generated) * 4


@pytest.mark.parametrize("slug", SLUGS)
def test_a_budget_nobody_exceeds_is_the_full_cache(model: PreTrainedModel, slug: str) -> None:
    runs = [run_greedy(model, [prompt(LENGTH)], p, NEW) for p in (make_policy(slug, LENGTH + NEW), make_policy("full"))]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].kept == runs[1].kept


@torch.inference_mode()
@pytest.mark.parametrize("slug", ["expected_attention", "critical_expected_attention", "compactor"])
def test_a_saved_cache_goes_on_as_the_one_it_was_saved_from(model: PreTrainedModel, slug: str, tmp_path: Path) -> None:
    model.set_attn_implementation("kvbench")
    policy = make_policy(slug, BUDGET, decode="evict")
    first, turn, rest = torch.tensor([prompt(LENGTH + 20)]).split([LENGTH, 12, 8], dim=1)
    held = KVCache(model.config, policy, prompt_length=LENGTH)
    prefill(model, first, None, held)
    held.save(tmp_path / "cache")
    caches = held, KVCache.load(tmp_path / "cache", model.config, policy)
    for cache in caches:
        cache.next_prompt(12)
        prefill(model, turn, None, cache)
    for token in rest.unbind(1):
        one, other = (model(token[None], past_key_values=cache).logits for cache in caches)
        assert torch.equal(one, other)
    assert caches[0].nbytes == caches[1].nbytes

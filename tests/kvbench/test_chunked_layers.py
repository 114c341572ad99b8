"""Layers whose tokens see their own chunk: what they see and hold, and that no policy and no budget counts them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import CHUNK, CodePoints, left_padded, prompt, tiny
from kv_oracle import Rules
from kv_runs import policy_for, run_greedy
from kv_simulate import simulate
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.inference.generate import generate_tokens
from kvbench.inference.teacher_forcing import in_blocks, text_scores
from kvbench.models.loading import Checkpoint, ModelSpec

NEW = 6


@cache
def model_of(temperature: bool = False) -> PreTrainedModel:
    """Layers 0 and 2 see chunks of 16 tokens. temperature: layer 1 sharpens queries by their place in the call."""
    model: Any = tiny("llama4")
    model.model.layers[1].self_attn.attn_temperature_tuning = model.config.attn_temperature_tuning = temperature
    return prepare(model)


def test_full_is_the_familys_eager_attention_beyond_a_chunk() -> None:
    """Calls that end inside a chunk and at its end, hold several chunks, or a token of the next."""
    model, ids = model_of(temperature=True), torch.tensor([prompt(70)])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("kvbench")
        cache = KVCache(model.config, make_policy("full"), prompt_length=60)
        calls = ids.split([5, CHUNK - 5, 1, 43, *[1] * 10], dim=1)
        got = torch.cat([model(call, past_key_values=cache).logits for call in calls], dim=1)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "rules", [Rules("snapkv", 20, window=6), Rules("h2o", 20, block=10), Rules("tova", 20, "caote", block=8)]
)
def test_what_is_kept_and_said_is_the_oracles(rules: Rules) -> None:
    trace = simulate(model_of(), prompt(45), 4, rules, chunks={0: CHUNK, 2: CHUNK})
    assert trace.margin() > 1e-6
    run = run_greedy(model_of(), [prompt(45)], policy_for(rules), 4)
    assert run.tokens[0] == trace.tokens
    assert run.of_row(0) == [layers[1:2] for layers in trace.kept]


def test_rows_are_what_they_are_alone() -> None:
    """One prefill for whole prompts, one batch for blocks, one of all that decodes; pre-passes and readers too."""
    slugs = ("full", "snapkv", "ada_snapkv", "cake", "kivi_g8_r8", "kvzip", "sirllm")
    policies = [*(make_policy(slug, 36) for slug in slugs), make_policy("h2o", 24, block=8), make_policy("quest", 16)]
    model, batch = model_of(), DecodeBatch(model_of())
    requests = [Request(torch.tensor([prompt(n, n)]), max_new_tokens=NEW, encoder=CodePoints()) for n in (50, 37, 9)]
    rows = [row for request in requests for row in batch.admit(request, policies)]
    while batch.in_flight:
        batch.step()
    for row in rows:
        alone = generate_tokens(model, row.request.input_ids, row.policy, max_new_tokens=NEW, encoder=CodePoints())
        assert row.error is None, row.policy.name
        assert row.tokens == alone.tokens[0], row.policy.name
        assert (row.cache.nbytes, row.cache.peak_nbytes) == (alone.cache.nbytes, alone.cache.peak_nbytes)
        for mine, its in zip(row.cache.attention_layers, alone.cache.attention_layers, strict=True):
            assert torch.equal(mine.positions.sort(-1).values, its.positions.sort(-1).values), row.policy.name


@pytest.mark.parametrize("fields", [{}, {"block": 8}])
def test_padded_sequences_are_what_they_are_alone(fields: dict[str, Any]) -> None:
    """Chunks begin where a sequence begins, not its padding."""
    policy, prompts = make_policy("tova", 20, **fields), [prompt(45, 1), prompt(30, 2), prompt(5, 3)]
    ids, mask = left_padded(prompts)
    both = generate_tokens(model_of(), ids, policy, attention_mask=mask, max_new_tokens=20)
    alone = [generate_tokens(model_of(), torch.tensor([one]), policy, max_new_tokens=20) for one in prompts]
    assert both.tokens == [one.tokens[0] for one in alone]


def test_sequences_of_several_lengths_are_refused_where_queries_are_sharpened_by_one_place() -> None:
    """Beyond 16 tokens here."""
    ids, mask = left_padded([prompt(45, 1), prompt(30, 2)])
    with pytest.raises(ValueError, match=r"beyond 16 tokens by one place .*, whose sequences have 30 to 45: run them"):
        generate_tokens(prepare(tiny("llama4")), ids, make_policy("full"), attention_mask=mask, max_new_tokens=2)


def test_a_layer_holds_a_chunk_and_a_text_is_scored_through_it() -> None:
    """Keys and values of 2 KV heads of 8 numbers in float64: 13 tokens of a short text, 16 of a long one."""
    for tokens, held in ((13, 13), (45, CHUNK)):
        cache = generate_tokens(
            model_of(), torch.tensor([prompt(tokens)]), make_policy("h2o", 8), max_new_tokens=1
        ).cache
        assert isinstance(cache, KVCache)
        assert sum(group.state_nbytes for group in cache.groups) == 2 * 2 * held * 2 * 8 * 8
        assert cache.kept_tokens().tolist() == [[[8, 8]]]
        assert cache.nbytes > 0 == cache.state_nbytes
    ids = torch.tensor([prompt(60)])
    expected = text_scores(model_of(), ids, in_blocks(make_policy("h2o", 20), 8)).nll
    cache = KVCache(model_of().config, make_policy("h2o", 20, block=8))
    with torch.no_grad():
        logits = model_of()(ids, past_key_values=cache).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")
    torch.testing.assert_close(nll, expected.to(nll.dtype), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [13, 45])
def test_the_bytes_of_full_are_those_of_transformers_own_cache(tokens: int) -> None:
    model = tiny("llama4")
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([prompt(tokens)]), past_key_values=theirs)
    held = sum(x.numel() * 8 for layer in theirs.layers for x in (layer.keys, layer.values))
    asked = Checkpoint(ModelSpec("own"), Path(), model.config, torch.float64, ())
    assert asked.full_cache_bytes(tokens) == held


def test_later_prompts_saved_caches_and_contexts_go_on(tmp_path: Path) -> None:
    model, policy = model_of(), make_policy("snapkv", 20, window=6)
    first, second = torch.tensor([prompt(45, 1)]), torch.tensor([prompt(30, 2)])
    cache = KVCache(model.config, policy)
    with torch.inference_mode():
        model(first, past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors", model.config, policy)
    for one in (cache, again):
        one.next_prompt(30)
    with torch.no_grad():
        logits, its = (model(second, past_key_values=one).logits for one in (cache, again))
    torch.testing.assert_close(logits, its, atol=0, rtol=0)
    whole = torch.cat([first, second], dim=1)
    grown = generate_tokens(model, whole, make_policy("full"), max_new_tokens=NEW, context_tokens=45)
    assert grown.tokens == generate_tokens(model, whole, make_policy("full"), max_new_tokens=NEW).tokens

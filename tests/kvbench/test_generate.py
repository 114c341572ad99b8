"""Generation: batches equal their rows one by one, through our loop and through `model.generate`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from kv_models import generated, left_padded, prompt, tiny
from kv_oracle import Rules
from kv_runs import policy_for, run_generate, run_greedy
from kv_simulate import simulate
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.engine.generate import generate_tokens

NEW = 6
LENGTHS = (13, 29, 22)  # shorter than the budget, longer, padded against each other
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


@cache
def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny(family, dtype=dtype)


EVICTING = [
    Rules("knorm", 16, block=8),
    Rules("h2o", 16, half_recent=True),
    Rules("tova", 16, "caote", block=8, order="evict_then_attend"),
    Rules("snapkv", 16, "fastcaote", block=12, window=8, kernel=3),
    Rules("snapkv", 0.5, window=4, decode="grow"),
]


@pytest.mark.parametrize("rules", EVICTING, ids=lambda r: r.slug)
def test_model_generate_equals_our_loop(rules: Rules) -> None:
    model, policy = model_of("llama"), policy_for(rules)
    chunk = 7 if rules.order == "attend_then_evict" else None  # blocks need not begin where chunks do
    theirs = run_generate(model, PROMPTS, policy, NEW, chunk=chunk, tell_length=True)
    ours = run_greedy(model, PROMPTS, policy, NEW)
    assert theirs.tokens == ours.tokens
    assert theirs.kept[-NEW:] == ours.kept[-NEW:]


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3"])
def test_full_generates_the_tokens_of_eager_attention(family: str) -> None:
    model = model_of(family, torch.float32)
    prompts = [prompt(length, seed=length) for length in (30, 41, 37)]
    model.set_attn_implementation("eager")
    expected = generated(model, prompts, NEW)
    full = make_policy("full")
    assert run_generate(model, prompts, full, NEW, chunk=16).tokens == expected
    assert run_greedy(model, prompts, full, NEW).tokens == expected


def test_without_a_length_the_first_call_is_the_whole_prompt() -> None:
    model, ids = model_of("llama"), prompt(30)
    rules = Rules("h2o", 12, half_recent=True)
    run = run_generate(model, [ids], policy_for(rules), NEW)
    trace = simulate(model, ids, NEW, rules)
    assert run.of_row(0) == trace.kept
    assert run.tokens[0] == trace.tokens


@pytest.mark.parametrize("budget", [12, 0.4])
def test_without_a_length_a_long_first_call_is_taken_in_in_blocks(budget: float) -> None:
    """README's example: what the command line gives, which knows the length and calls the model block by block."""
    model, ids = model_of("llama"), prompt(30)
    rules = Rules("h2o", budget, "caote", block=8)
    run, own = run_generate(model, [ids], policy_for(rules), NEW), run_greedy(model, [ids], policy_for(rules), NEW)
    trace = simulate(model, ids, NEW, rules)
    assert run.tokens == own.tokens == [trace.tokens]
    assert run.of_row(0) == own.of_row(0)[-NEW:] == trace.kept[-NEW:]


@pytest.mark.parametrize("slug", ["snapkv", "caote_h2o", "tova"])
def test_a_prompt_in_chunks_of_unknown_length_is_refused(slug: str) -> None:
    window: dict[str, Any] = {"window": 6} if slug == "snapkv" else {}
    policy = make_policy(slug, 16, **window)
    with pytest.raises(
        ValueError, match=r"brings 8 tokens .* ends after token 8 .*pass KVCache\(\.\.\., prompt_length="
    ):
        run_generate(model_of("llama"), [prompt(30)], policy, NEW, chunk=8)
    told = run_generate(model_of("llama"), [prompt(30)], policy, NEW, chunk=8, tell_length=True)
    assert told.tokens == run_generate(model_of("llama"), [prompt(30)], policy, NEW).tokens


def test_a_prompt_that_generate_feeds_token_by_token_needs_its_length() -> None:
    policy = make_policy("snapkv", 16, window=6)
    with pytest.raises(ValueError, match=r"first call brought one token .* pass KVCache\(\.\.\., prompt_length="):
        run_generate(model_of("llama"), [prompt(30)], policy, NEW, chunk=1)
    told = run_generate(model_of("llama"), [prompt(30)], policy, NEW, chunk=1, tell_length=True)
    assert told.tokens == run_generate(model_of("llama"), [prompt(30)], policy, NEW).tokens


@pytest.mark.parametrize("chunk", [None, 8, 29])
def test_a_length_beyond_the_prompts_end_is_refused_when_decoding_begins(chunk: int | None) -> None:
    model = model_of("llama")
    model.set_attn_implementation("kvbench")
    held = KVCache(model.config, make_policy("snapkv", 16, window=6), prompt_length=40)
    with pytest.raises(ValueError, match=r"decoding begins after token (29|30) .* ends the prompt after token 40"):
        generated(model, [prompt(30)], NEW, past_key_values=held, prefill_chunk_size=chunk)
    assert held.seen <= 30


@pytest.mark.parametrize("block", [None, 8])
def test_a_block_split_over_calls_is_refused_where_it_must_be_evicted_first(block: int | None) -> None:
    policy = policy_for(Rules("tova", 12, block=block, order="evict_then_attend"))
    with pytest.raises(ValueError, match="evict_then_attend needs each block in one call"):
        run_generate(model_of("llama"), [prompt(30)], policy, NEW, chunk=7, tell_length=True)


def stopped(model: PreTrainedModel, prompts: list[list[int]], **kwargs: Any) -> list[list[int]]:
    model.set_attn_implementation("kvbench")
    ids, mask = left_padded(prompts)
    return generate_tokens(
        model, ids, make_policy("tova", 16), attention_mask=mask, max_new_tokens=NEW, **kwargs
    ).tokens


@pytest.mark.parametrize("how", ["eos", "stop"])
def test_a_sequence_that_ends_early_leaves_the_others_as_they_were(how: str) -> None:
    model = model_of("llama")
    free = stopped(model, PROMPTS)
    last = free[1][2]
    assert all(last not in row for row in (free[0], free[2], free[1][:2]))
    at_word: Callable[[list[int]], bool] = lambda tokens: tokens[-1] == last  # noqa: E731
    ended = stopped(model, PROMPTS, eos_token_ids=[last]) if how == "eos" else stopped(model, PROMPTS, stop=at_word)
    assert ended[1] == (free[1][:2] if how == "eos" else free[1][:3])
    assert (ended[0], ended[2]) == (free[0], free[2])


@pytest.mark.parametrize("block", [None, 12])
def test_sums_over_the_block_begin_with_the_block_and_not_with_the_call(block: int | None) -> None:
    """Chunks of 7, and padding: the calls begin inside blocks."""
    model = model_of("llama")
    policy = policy_for(Rules("h2o", 16, block=block, accumulate=False))
    batch = run_generate(model, PROMPTS, policy, NEW, chunk=7, tell_length=True)
    for row, ids in enumerate(PROMPTS):
        assert batch.of_row(row)[-NEW:] == run_greedy(model, [ids], policy, NEW).of_row(0)[-NEW:]


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
def test_padding_anywhere_but_on_the_left_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="must mark padding on the left only"):
        generate_tokens(
            model_of("llama"),
            torch.tensor([prompt(4)]),
            make_policy("full"),
            attention_mask=torch.tensor([mask]),
            max_new_tokens=1,
        )


def test_an_ended_sequence_keeps_the_cache_it_had() -> None:
    model = model_of("llama")
    last = stopped(model, PROMPTS)[1][2]
    ids, mask = left_padded(PROMPTS)
    policy = make_policy("tova", 16)
    batch = generate_tokens(model, ids, policy, attention_mask=mask, max_new_tokens=NEW, eos_token_ids=[last])
    alone = generate_tokens(model, torch.tensor([PROMPTS[1]]), policy, max_new_tokens=NEW, eos_token_ids=[last])
    for ours, theirs in zip(batch.cache.layers, alone.cache.layers, strict=True):
        for head in range(2):
            held, expected = ours.positions[1, head], theirs.positions[0, head]
            assert sorted(held[held >= 0].tolist()) == sorted(expected[expected >= 0].tolist())

"""Generation: batches equal their rows one by one, through our loop and through `model.generate`."""

from functools import cache
from typing import Any

import pytest
import torch
from kv_models import generated, prompt, tiny
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
    with pytest.raises(ValueError, match=r"brings 8 tokens .* ends after token 8 .*pass KVCache"):
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

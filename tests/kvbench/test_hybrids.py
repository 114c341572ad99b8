"""Hybrids: attention layers are under the policy, the states of recurrent layers go along with their sequences."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kv_hybrids import HYBRIDS, tiny_hybrid
from kv_models import CodePoints, left_padded, prompt
from kv_oracle import Rules
from kv_runs import assert_rows_alone, kept_now, policy_for
from kv_simulate import simulate
from parameters import few_fast
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.prefill import prefill
from kvbench.engine.sequence import Request, script_of
from kvbench.engine.teacher_forcing import score_pair, text_scores
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy

BUDGET, NEW = 16, 6
CONTINUING = [family for family in HYBRIDS if family not in ("jamba", "zamba")]
EVERY = pytest.mark.slow("runs every hybrid family")
FAMILIES = few_fast(HYBRIDS, ("qwen3_5_text", "jamba"), EVERY)
"""A delta rule, and a family whose recurrences restart."""
RULES = [
    Rules("snapkv", window=6, kernel=3),
    Rules("h2o", half_recent=True),
    Rules("tova", value="caote", block=8),
    Rules("h2o", block=8),
]


@cache
def model(family: str) -> PreTrainedModel:
    return prepare(tiny_hybrid(family))


def read(running: PreTrainedModel, held: Cache, ids: Tensor, *calls: int) -> Tensor:
    """Logits [B,T,V] of tokens [B,T] that come in calls of these sizes."""
    begin, logits = held.get_seq_length(), []
    with torch.inference_mode():
        for part in ids.split(calls, dim=1):
            places = torch.arange(begin, begin + part.shape[1]).expand_as(part)
            logits.append(running(input_ids=part, position_ids=places, past_key_values=held).logits)
            begin += part.shape[1]
    return torch.cat(logits, dim=1)


def states(held: KVCache) -> dict[str, Tensor]:
    return {name: torch.cat([one.states[name] for one in held.sequences]) for name in held.sequences[0].states}


def assert_same_states(found: KVCache, expected: KVCache, row: int | slice = slice(None), within: float = 1e-4) -> None:
    """The states of a cache, and those of some row of another."""
    assert states(found).keys() == states(expected).keys()
    assert states(found)
    for name, state in states(expected).items():
        torch.testing.assert_close(
            states(found)[name], state[row].view_as(states(found)[name]), atol=within, rtol=within
        )


@pytest.mark.parametrize("family", HYBRIDS)
def test_full_gives_the_logits_of_the_familys_own_attention_and_cache(family: str) -> None:
    running, ids = tiny_hybrid(family), torch.tensor([prompt(40)])
    running.set_attn_implementation("eager")
    calls = (32, *[1] * 8)
    expected = read(running, DynamicCache(config=running.config), ids, *calls)
    own = KVCache(prepare(running).config, make_policy("full"), prompt_length=32)
    torch.testing.assert_close(read(running, own, ids, *calls), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "jamba"])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.slug)
def test_kept_tokens_and_text_equal_the_slow_oracle(family: str, rules: Rules) -> None:
    if rules.block and family not in CONTINUING:
        pytest.skip("transformers begins its recurrences anew at every call of several tokens")
    ids, rules = prompt(37), replace(rules, budget=BUDGET)
    trace = simulate(model(family), ids, NEW, rules)
    assert trace.margin() > 1e-5, "two scores nearly tie"
    done = generate_tokens(model(family), torch.tensor([ids]), policy_for(rules), max_new_tokens=NEW)
    assert done.tokens == [trace.tokens]
    assert kept_now(done.cache)[0] == trace.kept[-1]
    assert len(trace.kept[-1]) == 2  # the layers with attention


POLICIES = [
    make_policy("snapkv", BUDGET, window=6),
    make_policy("h2o", BUDGET, block=1),
    make_policy("caote_tova", BUDGET, block=8),
    make_policy("ada_snapkv", BUDGET, window=6),
    make_policy("full"),
]


def alone(family: str, ids: list[int], policy: Policy, **more: Any) -> Generation:
    more = {"max_new_tokens": NEW, "encoder": CodePoints(), **more}
    return generate_tokens(model(family), torch.tensor([ids]), policy, **more)


def test_padding_after_tokens_is_refused_which_states_would_take_in() -> None:
    running, (ids, mask) = model("lfm2"), left_padded([prompt(20), prompt(13, seed=1)])
    held = KVCache(running.config, make_policy("full"))
    running(input_ids=ids, attention_mask=mask, past_key_values=held)
    held.next_prompt([4, 9])
    later, real = left_padded([prompt(4), prompt(9, seed=1)])
    places = 20 + real.cumsum(1) - 1  # behind the columns of the first call, without the new padding
    with pytest.raises(ValueError, match=r"^sequence 0 is padded after the 20 tokens it has seen, .* or one by one$"):
        running(
            input_ids=later, attention_mask=torch.cat([mask, real], dim=1), position_ids=places, past_key_values=held
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_one_batch_are_equal_alone(family: str) -> None:
    """All policies share a reading of their prompt, and examples enter while others decode."""
    assert_rows_alone(model(family), [*POLICIES, make_policy("snapkv", BUDGET + 4, window=6)], (37, 24), NEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_prompt_goes_on_from_the_states(family: str) -> None:
    running, ids = model(family), torch.tensor([prompt(40)])
    held = KVCache(running.config, make_policy("full"))
    read(running, held, ids[:, :20], 20)
    held.next_prompt(20)
    logits = prefill(running, ids[:, 20:], held)
    with torch.inference_mode():
        expected = running(ids, past_key_values=KVCache(running.config, make_policy("full"))).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    held = KVCache(running.config, make_policy("snapkv", BUDGET, window=6))
    read(running, held, ids[:, :20], 20)
    held.next_prompt(20)
    prefill(running, ids[:, 20:], held)
    held.audit()
    assert held.kept_tokens().unique().tolist() == [BUDGET]


def test_given_tokens_are_rated_as_by_transformers_own_cache() -> None:
    """A continuation in calls of any size, and a text in blocks of a policy that evicts nothing of it."""
    for family in ("qwen3_5_text", "jamba"):
        running, ids = model(family), torch.tensor([prompt(40)])
        with torch.inference_mode():
            logits = running(ids, past_key_values=KVCache(running.config, make_policy("full"))).logits
        expected = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        found = score_pair(running, Pair(ids[0, :25].tolist(), ids[0, 25:].tolist()), make_policy("full"))
        torch.testing.assert_close(found.logprobs, expected[24:], atol=1e-3, rtol=1e-3)
        rated = text_scores(running, ids, make_policy("tova", 64, block=8))
        torch.testing.assert_close(-rated.nll, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("slug", ["kvzip"])
def test_a_pass_over_the_prompt_leaves_the_states_as_they_were(slug: str) -> None:
    ids = prompt(37)
    plain = alone("qwen3_5_text", ids, make_policy("full"), max_new_tokens=1)
    passed = alone("qwen3_5_text", ids, make_policy(slug, BUDGET), max_new_tokens=1)
    assert passed.cache.sequence.passed != 0
    assert passed.tokens == plain.tokens
    assert_same_states(passed.cache, plain.cache, within=0)


BYTES = {
    # two layers: 4 inputs of a convolution over 2 x 2 x 8 + 4 x 8 channels, 4 heads of 8 x 8 numbers, all float32
    "qwen3_5_text": 2 * 4 * (4 * (2 * 2 * 8 + 4 * 8) + 4 * 8 * 8),
    "qwen3_next": 2 * 4 * (4 * (2 * 2 * 8 + 4 * 8) + 4 * 8 * 8),
    # two layers: 4 inputs of 64 + 2 x 8 channels, 4 heads of 16 x 8
    "bamba": 2 * 4 * (4 * (64 + 2 * 8) + 4 * 16 * 8),
    "falcon_h1": 2 * 4 * (4 * (64 + 2 * 8) + 4 * 16 * 8),
    "nemotron_h": 2 * 4 * (4 * (64 + 2 * 8) + 4 * 16 * 8),
    # two layers: 3 inputs of 32 channels
    "lfm2": 2 * 4 * 3 * 32,
    # two layers: 4 inputs of 64 channels, 64 x 8
    "jamba": 2 * 4 * (4 * 64 + 64 * 8),
}


@pytest.mark.parametrize(("family", "nbytes"), BYTES.items())
def test_states_are_counted_beside_keys_and_values_and_do_not_grow(family: str, nbytes: int) -> None:
    running, ids = model(family), torch.tensor([prompt(30), prompt(30, seed=1)])
    held = KVCache(running.config, make_policy("full"), prompt_length=28)
    read(running, held, ids[:, :28], 28)
    assert held.state_nbytes == 2 * nbytes
    assert held.nbytes == 2 * nbytes + sum(layer.nbytes for layer in held.attention_layers)
    assert held.peak_nbytes >= held.nbytes
    read(running, held, ids[:, 28:], 1, 1)
    assert held.state_nbytes == 2 * nbytes


def test_a_family_that_begins_anew_is_given_no_later_tokens_together() -> None:
    running, ids = model("jamba"), torch.tensor([prompt(30)])
    held = KVCache(running.config, make_policy("full"))
    read(running, held, ids[:, :20], 20)
    with pytest.raises(ValueError, match="recurrent layers of this model restart at every call of several tokens"):
        read(running, held, ids[:, 20:], 10)


def test_pre_passes_that_such_a_family_cannot_follow_are_refused_in_a_sentence() -> None:
    """KVzip looks at a prompt again; SirLLM rates a later prompt's tokens by one call."""
    needs = "needs calls of several tokens after the first, but JambaForCausalLM resets its recurrent layers at every"
    with pytest.raises(ValueError, match=f"^kvzip {needs} such call: use another"):
        alone("jamba", prompt(37), make_policy("kvzip", BUDGET))
    first, both = (
        Request(script_of(torch.tensor([prompt(sum(turns))]), turns=turns), NEW) for turns in ((37,), (37, 9))
    )
    policies = [make_policy("sirllm", BUDGET)]
    (answered,), (failed,) = (DecodeBatch(model("jamba")).admit([request], policies)[0] for request in (first, both))
    assert answered.error is None
    assert str(failed.error).startswith(f"sirllm {needs} such call: use another")

"""Kept positions of every layer and KV head after every call, and the generated tokens, against the slow oracle."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kv_models import FAMILIES, prompt, tiny
from kv_oracle import Rules
from kv_runs import policy_for, run_generate, run_greedy
from kv_simulate import simulate
from parameters import few_fast
from transformers import PreTrainedModel

NEW = 5
BUDGET = 16
BASES = [
    Rules("knorm"),
    Rules("streamingllm"),
    Rules("local_window"),
    Rules("h2o", half_recent=True),
    Rules("h2o"),
    Rules("tova"),
    Rules("snapkv", window=6, kernel=3),
]
WRAPPED = [
    replace(rules, value=value)
    for value in ("caote", "fastcaote")
    for rules in (Rules("knorm"), Rules("h2o"), Rules("tova"), Rules("snapkv", window=6, kernel=3))
]
CALLS: dict[str, dict[str, Any]] = {  # where prompt tokens are evicted, where decoded ones, and which comes first
    "prompt": {"block": None, "decode": "evict"},
    "prompt, grow": {"block": None, "decode": "grow"},
    "blocks of 8": {"block": 8, "decode": "evict"},
    "blocks of 8, evicting first": {"block": 8, "decode": "evict", "order": "evict_then_attend"},
    "prompt, evicting first": {"block": None, "decode": "evict", "order": "evict_then_attend"},
}
FAST = "prompt", "blocks of 8", "blocks of 8, evicting first"
LONG = 37  # several blocks of 8 and one of 5


@cache
def model_of(family: str = "llama", kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny(family, kv_heads=kv_heads, dtype=dtype)


def assert_agrees(model: PreTrainedModel, rules: Rules, ids: list[int]) -> None:
    trace = simulate(model, ids, NEW, rules)
    assert trace.margin() > 1e-6, "two scores nearly tie: choose another prompt"
    run = run_greedy(model, [ids], policy_for(rules), NEW)
    assert run.of_row(0) == trace.kept
    assert run.tokens[0] == trace.tokens


@pytest.mark.parametrize("rules", [*BASES, *WRAPPED], ids=lambda rules: rules.slug)
@pytest.mark.parametrize("calls", few_fast(CALLS, FAST, pytest.mark.slow("runs the slow oracle")))
def test_every_policy_keeps_the_tokens_of_the_slow_oracle(rules: Rules, calls: str) -> None:
    assert_agrees(model_of(), replace(rules, budget=BUDGET, **CALLS[calls]), prompt(LONG))


@pytest.mark.parametrize("rules", [BASES[4], WRAPPED[7]], ids=lambda r: r.slug)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama"])
def test_every_family_keeps_the_tokens_of_the_slow_oracle(family: str, rules: Rules) -> None:
    assert_agrees(model_of(family), replace(rules, budget=BUDGET, block=12), prompt(LONG))


@pytest.mark.parametrize("rules", [BASES[3], WRAPPED[2], WRAPPED[3]], ids=lambda r: r.slug)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_kv_head_and_as_many_as_query_heads_agree_too(kv_heads: int, rules: Rules) -> None:
    assert_agrees(model_of(kv_heads=kv_heads), replace(rules, budget=BUDGET, block=8), prompt(LONG))


@pytest.mark.parametrize("length", [3, BUDGET, BUDGET + 1])
@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("rules", [BASES[6], WRAPPED[1]], ids=lambda r: r.slug)
def test_prompts_around_the_budget_agree(rules: Rules, block: int | None, length: int) -> None:
    assert_agrees(model_of(), replace(rules, budget=BUDGET, block=block), prompt(length))


OPTIONS = [
    Rules("h2o", accumulate=False),
    Rules("h2o", by_age=True),
    Rules("h2o", value="caote", gqa="group_l2"),
    Rules("tova", value="caote", gqa="score_mean"),
    Rules("snapkv", value="fastcaote", window=6, gqa="group_l2", pool="avg"),
    Rules("snapkv", value="caote", window=6, norm_domain="candidates"),
    Rules("snapkv", window=6, pool="none"),
    Rules("tova", value="caote", f_norm="softmax"),
    Rules("h2o", value="caote", f_norm="minmax_sum"),
    Rules("tova", granularity="layer"),
    Rules("h2o", value="caote", granularity="layer"),
    Rules("snapkv", window=6, granularity="query_head"),
    Rules("tova", value="fastcaote", granularity="query_head"),
]


@pytest.mark.parametrize("rules", OPTIONS, ids=repr)
def test_every_option_agrees(rules: Rules) -> None:
    assert_agrees(model_of(), replace(rules, budget=BUDGET, block=8), prompt(LONG))


# many settings at random


def drawn(draw: random.Random) -> Rules:
    """Some rules that have a meaning."""
    rules = draw.choice(BASES + WRAPPED)
    rules = replace(
        rules,
        budget=draw.choice([BUDGET, 24, 0.4, 0.61]),
        block=draw.choice([None, 1, 8, 13, 32]),
        decode=draw.choice(["evict", "evict", "grow"]),
        order=draw.choice(["attend_then_evict", "attend_then_evict", "evict_then_attend"]),
        pool=draw.choice(["max", "avg", "none"]),
        granularity=draw.choice(["kv_head", "kv_head", "query_head", "layer"]),
        by_age=draw.choice([False, False, True]),
    )
    if rules.value is not None:
        rules = replace(
            rules,
            gqa=draw.choice(["alpha_mean", "alpha_mean", "group_l2", "score_mean"]),
            norm_domain=draw.choice(["all", "all", "candidates"]),
            f_norm=draw.choice(["auto", "auto", "minmax_sum", "softmax"]),
        )
    if rules.base == "knorm" and rules.value is not None:  # it scores KV heads only
        rules = replace(rules, gqa="alpha_mean", granularity="kv_head")
    return rules


@pytest.mark.slow("runs the slow oracle")
@pytest.mark.parametrize("seed", range(120))
def test_settings_at_random_agree_alone_in_a_batch_and_through_generate(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    model = model_of(draw.choice(FAMILIES), draw.choice([1, 2, 4]), dtype)
    rules, length = drawn(draw), draw.choice([19, BUDGET, BUDGET + 1, LONG, 50])
    ids = prompt(length, seed)
    trace = simulate(model, ids, NEW, rules)
    if trace.margin() < (1e-6 if dtype == torch.float64 else 1e-3):
        pytest.skip("two scores nearly tie")
    policy = policy_for(rules)
    alone = run_greedy(model, [ids], policy, NEW)
    assert (alone.of_row(0), alone.tokens[0]) == (trace.kept, trace.tokens)
    batch = [prompt(length + 7, 1), ids, prompt(max(length - 9, 16), 2)]  # 0.4 of 16 is still a window
    padded = run_greedy(model, batch, policy, NEW)
    assert (padded.of_row(1)[-NEW:], padded.tokens[1]) == (trace.kept[-NEW:], trace.tokens)
    chunk = None if rules.order == "evict_then_attend" else draw.choice([None, 7, 8])
    theirs = run_generate(model, batch, policy, NEW, chunk=chunk, tell_length=True)
    assert (theirs.of_row(1)[-NEW:], theirs.tokens[1]) == (trace.kept[-NEW:], trace.tokens)

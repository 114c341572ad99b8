"""CAKE, P2A and pyramid budgets on tiny random models: what every head keeps equals an independent slow simulation."""

from typing import Any

import pytest
import torch
from cake_oracle import CakeRules, simulate_cake
from kv_models import prompt, tiny
from kv_runs import run_generate, run_greedy

from kvbench import KVCache, make_policy
from kvbench.policies.policy import Policy

WINDOW, BUDGET, LONG, STEPS = 8, 20, 48, 3
LENGTHS = {"shorter than the window": 5, "shorter": 19, "equal": 20, "one longer": 21, "long": LONG}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cake": ("cake", {}, {}),
    "tau": ("cake", {"tau1": 1.6, "tau2": 0.4, "kernel": 3, "gamma": 7.0}, {}),
    "official": ("cake", {"rounding": "official", "cascading": False, "tau2": 0.2}, {"allocation": "official"}),
    "grow": ("cake", {"decode": "grow"}, {}),
    "accumulate": ("cake", {"decode_rule": "accumulate"}, {}),
    "slot order": ("cake", {"slot_order": "score"}, {}),
    "mean": ("cake_ind_mean", {}, {"indicator": "mean"}),
    "variance": ("cake_ind_var", {"kernel": 3}, {"indicator": "var"}),
    "product": ("cake_ind_mean_times_var", {}, {"indicator": "product"}),
    "uniform": ("cake_alloc_uniform", {}, {"allocation": "uniform"}),
    "pyramid": ("cake_alloc_pyramid", {}, {"allocation": "pyramid"}),
    "neither": ("cake_alloc_uniform_ind_mean", {}, {"allocation": "uniform", "indicator": "mean"}),
    "entropy": ("cake_alloc_h_ind_mean", {"tau1": 0.2}, {"allocation": "h_only", "indicator": "mean"}),
    "p2a_snapkv": ("p2a_snapkv", {"kernel": 7}, {"scorer": "snapkv"}),
    "p2a_h2o": ("p2a_h2o", {"recent": WINDOW}, {"scorer": "h2o"}),
    "p2a_tova": ("p2a_tova", {}, {"scorer": "tova"}),
    "pyramidkv": ("pyramidkv", {"kernel": 7}, {"scorer": "snapkv", "allocation": "pyramid", "decode": "grow"}),
}
SHARED = ("tau1", "tau2", "kernel", "gamma", "decode", "decode_rule", "slot_order")


def setting(name: str) -> tuple[Policy, CakeRules]:
    """The public policy and what the slow simulation is told to do."""
    slug, fields, rules = SETTINGS[name]
    policy = make_policy(slug, BUDGET, window=WINDOW, **fields)
    same = {k: v for k, v in fields.items() if k in SHARED}
    return policy, CakeRules(BUDGET, window=WINDOW, **same, **rules)


def agree(model: Any, length: int, name: str, seed: int = 0) -> None:
    policy, rules = setting(name)
    ids = prompt(length, seed)
    tokens, slow = simulate_cake(model, ids, STEPS, rules)
    run = run_greedy(model, [ids], policy, STEPS)
    assert run.of_row(0) == slow.kept
    assert run.tokens == [tokens]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_setting_keeps_what_the_slow_simulation_keeps(name: str) -> None:
    agree(tiny(layers=4), LONG, name)


def test_the_settings_keep_different_tokens() -> None:
    model, ids = tiny(layers=4), prompt(LONG)
    kept = {name: run_greedy(model, [ids], setting(name)[0], STEPS).kept for name in SETTINGS}
    same = [(a, b) for a in kept for b in kept if a < b and kept[a] == kept[b]]
    assert not same, "they would prove nothing about each other"


@pytest.mark.parametrize("length", list(LENGTHS.values()), ids=list(LENGTHS))
@pytest.mark.parametrize("name", ["cake", "p2a_h2o", "pyramidkv"])
def test_short_and_exact_prompts_keep_what_the_slow_simulation_keeps(name: str, length: int) -> None:
    agree(tiny(layers=3), length, name, seed=1)


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 1), ("mistral", 2), ("qwen2", 4), ("qwen3", 2)])
def test_families_and_head_counts_keep_what_the_slow_simulation_keeps(family: str, kv_heads: int) -> None:
    agree(tiny(family, kv_heads=kv_heads, layers=3), 45, "cake", seed=2)


@pytest.mark.parametrize("name", ["cake", "p2a_snapkv", "p2a_h2o", "pyramidkv", "accumulate"])
def test_a_padded_batch_keeps_what_its_sequences_keep_alone(name: str) -> None:
    model, (policy, _) = tiny(layers=3), setting(name)
    prompts = [prompt(LONG), prompt(21, 1), prompt(6, 2), prompt(44, 3)]
    together = run_greedy(model, prompts, policy, STEPS)
    for row, ids in enumerate(prompts):
        alone = run_greedy(model, [ids], policy, STEPS)
        assert together.of_row(row) == alone.of_row(0)
        assert together.tokens[row] == alone.tokens[0]


@pytest.mark.parametrize("slug", ["cake", "p2a_snapkv", "p2a_h2o", "caote_cake", "fastcaote_p2a_h2o"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_cascade_keeps_what_one_eviction_after_the_last_layer_keeps(slug: str, batch: int) -> None:
    model = tiny(layers=6)
    prompts = [prompt(LONG + 7 * i, i) for i in range(batch)]
    fields: dict[str, Any] = {"recent": WINDOW} if "h2o" in slug else {}
    runs = [
        run_greedy(model, prompts, make_policy(slug, BUDGET, window=WINDOW, cascading=cascading, **fields), STEPS)
        for cascading in (True, False)
    ]
    assert runs[0].kept == runs[1].kept
    assert runs[0].tokens == runs[1].tokens
    sizes = {len(head) for row in runs[0].kept[0] for layer in row for head in layer}
    assert len(sizes) > 1, "the layers of this model should differ"


def most_held(cascading: bool, layers: int, length: int) -> tuple[int, int]:
    """The most bytes ever held, and the bytes of one token of one layer with its score, in all heads."""
    model = tiny(layers=layers)
    policy = make_policy("cake", BUDGET, window=WINDOW, cascading=cascading)
    cache = run_greedy(model, [prompt(length)], policy, 1).cache
    assert cache is not None
    heads, dim = model.config.num_key_value_heads, 8
    return cache.peak_nbytes, heads * (2 * dim * 8 + 4 + 8 + 1)  # key and value, position, score, protected


def test_a_cascade_never_holds_more_than_the_budget_and_one_prompt() -> None:
    layers, length = 6, 200
    once, per_token = most_held(False, layers, length)
    cascade, _ = most_held(True, layers, length)
    window = layers * WINDOW * 4 * 8 * 8  # the observing queries
    spare = layers * per_token
    assert once > layers * length * per_token * 0.95
    assert cascade <= (BUDGET * layers + length) * per_token + window + spare


def test_no_query_is_held_while_decoding() -> None:
    """As many bytes as a policy that never looks at a query."""
    model = tiny(layers=3)
    policies = make_policy("cake_alloc_uniform", BUDGET, window=WINDOW), make_policy("streamingllm", BUDGET)
    caches = [run_greedy(model, [prompt(LONG)], policy, STEPS).cache for policy in policies]
    assert caches[0].nbytes == caches[1].nbytes


@pytest.mark.parametrize("length", [BUDGET + 1, BUDGET + WINDOW, BUDGET + WINDOW + 1])
def test_the_official_gate_waits_for_the_first_decoding_step(length: int) -> None:
    model, ids = tiny(layers=3), prompt(length)
    policy = make_policy("cake", BUDGET, window=WINDOW, official_gate=True)
    tokens, slow = simulate_cake(model, ids, STEPS, CakeRules(BUDGET, window=WINDOW, official_gate=True))
    run = run_generate(model, [ids], policy, STEPS)
    assert run.of_row(0) == slow.kept
    assert run.tokens == [tokens]
    sizes = [{len(head) for layer in call for head in layer} for call in run.of_row(0)]
    assert sizes[0] == ({length} if length <= BUDGET + WINDOW else sizes[-1])
    run.cache.audit()


def test_a_gated_prompt_passes_the_audit_before_anything_was_decoded() -> None:
    model = tiny(layers=3)
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("cake", BUDGET, window=WINDOW, official_gate=True))
    with torch.no_grad():
        model(torch.tensor([prompt(BUDGET + 3)]), past_key_values=cache)
    cache.audit()
    assert cache.kept_tokens().unique().tolist() == [BUDGET + 3]

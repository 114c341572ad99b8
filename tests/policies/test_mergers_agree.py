"""D2O, RoCo, CaM and SirLLM on tiny random models: kept positions after every call, keys, values and tokens."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from kv_mergers import (
    CaMSequence,
    D2ORules,
    D2OSequence,
    RoCoSequence,
    Selecting,
    SirLLMSequence,
    contents,
    simulate_with,
)
from kv_models import prompt, tiny
from kv_runs import Run, run_generate, run_greedy
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.policies.draws import uniform_draws

NEW = 6
BUDGET = 16
LONG = 47
D2OS: dict[str, dict[str, Any]] = {
    "d2o": {},
    "d2o_raw": {"norm": "raw"},
    "d2o_n1_m3": {"n": 1, "m": 3},
    "d2o_beta0.5": {"beta": 0.5},
    "d2o_alloc_exp_decay": {},  # at equal total the softmax
    "d2o_alloc_recip_var": {"allocation": "reciprocal"},
    "d2o_alloc_uniform": {"allocation": "uniform"},
    "d2o_no_layer": {"allocation": "uniform"},
    "d2o_no_ema": {"ema": False},
    "d2o_no_layer_no_ema": {"allocation": "uniform", "ema": False},
    "d2o_sim_v": {"similarity": "values"},
    "d2o_sim_k_v_separate": {"similarity": "separate"},
    "d2o_merge_avg": {"merge": "average"},
}


@cache
def model_of(family: str = "llama", kv_heads: int = 2, layers: int = 3) -> PreTrainedModel:
    return tiny(family, kv_heads=kv_heads, layers=layers)


def draw(layer: int, kv: int, position: int) -> float:
    return float(uniform_draws(0, layer, torch.full((1, kv + 1, 1), position))[0, kv, 0])


def slow(slug: str, model: PreTrainedModel, budget: int | float, length: int) -> Selecting:
    if slug in D2OS:
        return D2OSequence(model, D2ORules(budget, **D2OS[slug]), length)
    if slug == "cam":
        return CaMSequence(model, budget, length, 32, draw)
    return {"roco": RoCoSequence, "sirllm": SirLLMSequence}[slug](model, budget, length)


def assert_holds(run: Run, sequence: Selecting, row: int = 0) -> None:
    """The cache holds the slow sequence's keys and values, position by position."""
    for layer, heads in zip(run.cache.layers, contents(sequence.heads), strict=True):
        for kv, held in enumerate(heads):
            slots = {int(p): slot for slot, p in enumerate(layer.positions[row, kv]) if p >= 0}
            assert sorted(slots) == sorted(held)
            for position, (key, value) in held.items():
                np.testing.assert_allclose(layer.keys[row, kv, slots[position]].numpy(), key, rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(layer.values[row, kv, slots[position]].numpy(), value, rtol=1e-8, atol=1e-10)


def assert_agrees(slug: str, model: PreTrainedModel, budget: int | float, length: int, **fields: Any) -> None:
    sequence, ids = slow(slug, model, budget, length), prompt(length)
    trace = simulate_with(model, ids, NEW, sequence)
    if isinstance(sequence, D2OSequence):
        assert sequence.closest_call > 1e-9, "a similarity nearly ties with its threshold: choose another prompt"
    run = run_greedy(model, [ids], make_policy(slug, budget, **fields), NEW)
    assert run.of_row(0) == trace.kept
    assert run.tokens[0] == trace.tokens
    assert_holds(run, sequence)


@pytest.mark.parametrize("budget", [BUDGET, 0.35])
@pytest.mark.parametrize("slug", [*D2OS, "roco", "cam", "sirllm"])
def test_every_policy_holds_what_the_slow_one_holds(slug: str, budget: int | float) -> None:
    assert_agrees(slug, model_of(), budget, LONG)


@pytest.mark.parametrize("slug", ["d2o", "roco", "cam", "sirllm"])
@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3", "gemma2"])
def test_every_family_holds_what_the_slow_one_holds(family: str, slug: str) -> None:
    assert_agrees(slug, model_of(family), BUDGET, LONG)


@pytest.mark.parametrize("slug", ["d2o", "roco", "cam", "sirllm"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_kv_head_and_as_many_as_query_heads_agree_too(kv_heads: int, slug: str) -> None:
    assert_agrees(slug, model_of(kv_heads=kv_heads), BUDGET, LONG)


@pytest.mark.parametrize("length", [2, BUDGET - 1, BUDGET, BUDGET + 1])
@pytest.mark.parametrize("slug", ["d2o", "d2o_alloc_uniform", "roco", "cam", "sirllm"])
def test_prompts_around_the_budget_agree(slug: str, length: int) -> None:
    assert_agrees(slug, model_of(), BUDGET, length)


@pytest.mark.parametrize("budget", [BUDGET, 0.4])
@pytest.mark.parametrize("slug", ["d2o", "d2o_sim_k_v_separate", "d2o_alloc_uniform", "roco", "cam", "sirllm"])
def test_a_padded_batch_holds_what_its_rows_hold(slug: str, budget: int | float) -> None:
    model = model_of()
    prompts = [prompt(LONG), prompt(40, seed=1), prompt(BUDGET + 1, seed=2)]
    if isinstance(budget, float):
        prompts[2] = prompt(50, seed=2)  # two fifths of 17 tokens are fewer than always stay
    both = run_greedy(model, prompts, make_policy(slug, budget), NEW)
    for row, ids in enumerate(prompts):
        sequence = slow(slug, model, budget, len(ids))
        trace = simulate_with(model, ids, NEW, sequence)
        assert both.tokens[row] == trace.tokens
        assert both.of_row(row) == trace.kept
        assert_holds(both, sequence, row)


@pytest.mark.parametrize("slug", ["d2o", "d2o_alloc_uniform", "cam"])
def test_merging_into_the_ragged_store_is_merging_into_the_dense_one(slug: str) -> None:
    assert_agrees(slug, model_of(), BUDGET, LONG, store={"_target_": "kvbench.policies.stores.ragged.Ragged"})


@pytest.mark.parametrize("slug", ["d2o", "cam", "roco"])
def test_model_generate_agrees_with_our_own_loop(slug: str) -> None:
    model, policy = model_of(), make_policy(slug, BUDGET)
    ours, theirs = run_greedy(model, [prompt(LONG)], policy, NEW), run_generate(model, [prompt(LONG)], policy, NEW)
    assert theirs.tokens == ours.tokens
    assert theirs.kept == ours.kept


def test_d2o_without_merging_and_with_uniform_allocation_is_h2o_with_sinks() -> None:
    class H2OWithSinks(Selecting):
        """Summed attention, four sinks, a quarter of the rest recent."""

        def scores(self, layer: int, kv: int) -> dict[int, float]:
            return self.sums(layer, kv)

        def safe(self, layer: int, kv: int, budget: int) -> set[int]:
            recent = (budget - 4) // 4
            return {p for p in self.heads[layer][kv].keys if p < 4 or p >= self.seen_after - recent}

    model, ids = model_of(), prompt(LONG)
    drop = {"_target_": "kvbench.policies.mergers.drop.Drop"}
    sequence = H2OWithSinks(model, 20, LONG)
    trace = simulate_with(model, ids, NEW, sequence)
    uniform, by_field = (
        make_policy("d2o_alloc_uniform", 20, merger=drop),
        make_policy("d2o", 20, merger=drop, allocation="uniform"),
    )
    for policy in (uniform, by_field):
        run = run_greedy(model, [ids], policy, NEW)
        assert run.of_row(0) == trace.kept
        assert run.tokens[0] == trace.tokens


def test_sirllm_in_model_generate_is_refused_in_one_sentence() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"look at a prompt again .* which model\.generate does not: use"):
        run_generate(model, [prompt(LONG)], make_policy("sirllm", BUDGET), NEW)


def test_sirllm_in_a_decoding_loop_that_tells_nothing_is_refused() -> None:
    from kvbench.inference.prefill import prefill

    model = model_of()
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("sirllm", BUDGET), prompt_length=LONG)
    with torch.no_grad():
        prefill(model, torch.tensor([prompt(LONG)]), None, cache)
        assert cache.kept_tokens().tolist() == [[[BUDGET, BUDGET]]] * 3
        with pytest.raises(ValueError, match="scores tokens by the model's own probabilities"):
            model(torch.tensor([[5]]), past_key_values=cache)

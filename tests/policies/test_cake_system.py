"""CAKE, P2A and pyramid budgets on tiny random models: what every head keeps equals an independent slow simulation."""

from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import run_greedy

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare

WINDOW, BUDGET, LONG, STEPS = 8, 20, 48, 3


@pytest.mark.parametrize("slug", ["cake", "p2a_snapkv", "p2a_h2o", "caote_cake", "fastcaote_p2a_h2o"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_cascade_equals_one_eviction_after_the_last_layer(slug: str, batch: int) -> None:
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


def test_a_gated_prompt_passes_the_audit_before_anything_was_decoded() -> None:
    model = prepare(tiny(layers=3))
    cache = KVCache(model.config, make_policy("cake", BUDGET, window=WINDOW, official_gate=True))
    with torch.no_grad():
        model(torch.tensor([prompt(BUDGET + 3)]), past_key_values=cache)
    cache.audit()
    assert cache.kept_tokens().unique().tolist() == [BUDGET + 3]

"""D2O as released: late eviction, whole layers, clipped shares, one threshold per layer, against a slow version."""

from kv_models import prompt, tiny
from kv_runs import run_greedy

from kvbench import make_policy

LAYERS, LENGTH, NEW = 6, 50, 6
WHOLE = {0, 1, LAYERS - 1}


def test_two_tokens_are_those_of_the_full_cache_and_some_layers_are_never_compressed() -> None:
    model, ids = tiny(layers=LAYERS), prompt(LENGTH)
    full = run_greedy(model, [ids], make_policy("full"), NEW)
    run = run_greedy(model, [ids], make_policy("d2o_released", 0.3), NEW)
    assert run.tokens[0][:2] == full.tokens[0][:2]
    assert run.tokens[0] != full.tokens[0]
    held = [len(layer[0]) for layer in run.of_row(0)[-1]]
    assert {layer for layer, tokens in enumerate(held) if tokens == LENGTH + NEW - 1} == WHOLE

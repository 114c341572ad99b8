"""`ada_` before a policy: kvpress's AdaKV around the same scorer keeps the same tokens."""

from kv_models import prompt
from kv_runs import run_greedy
from kvpress_kept import assert_same, presses, small

from kvbench import make_policy


def test_heads_come_to_hold_different_numbers_and_the_layer_its_budget() -> None:
    run = run_greedy(small("llama"), [prompt(60)], make_policy("ada_keydiff", 30), 3)
    kept = run.cache.kept_tokens()[:, 0]
    assert kept.sum(-1).tolist() == [60, 60]
    assert len(set(kept.flatten().tolist())) > 1


def test_kvpress_keeps_the_same_around_keydiff_and_knorm() -> None:
    kvpress = presses()
    for slug, press in (("ada_keydiff", kvpress.KeyDiffPress()), ("ada_knorm", kvpress.KnormPress())):
        assert_same(slug, kvpress.AdaKVPress(press), 35, 90, rounding="kvpress")

"""FINCH: the question's queries weighted by what they see, and kept keys without gaps."""

import torch
from kv_crafted import observed
from kv_models import prompt, tiny
from kvpress_kept import assert_same, presses

from kvbench import KVCache, make_policy
from kvbench.policies.scorers.finch import Finch


def test_a_query_counts_by_the_tokens_it_sees() -> None:
    """Two queries at positions 2 and 3: attention (1/4, 1/2, 1/4, 0) times 3 and (1/2, 0, 0, 1/2) times 4, halved."""
    rows = torch.tensor([[[[[0.25, 0.5, 0.25, 0.0], [0.5, 0.0, 0.0, 0.5]]]]])
    keys = torch.zeros(1, 1, 4, 8)
    seen = observed(keys, recent_queries=keys[:, :, 2:], recent_positions=torch.tensor([[2, 3]]))
    seen._known["rows", 2] = rows
    expected = torch.tensor([[[0.75 + 2, 1.5, 0.75, 2.0]]]) / 2
    torch.testing.assert_close(Finch(window=2).score(seen, {}), expected)
    official = torch.tensor([[[0.5 + 1.5, 1.0, 0.5, 1.5]]]) / 2
    torch.testing.assert_close(Finch(window=2, official=True).score(seen, {}), official)


def test_kept_keys_stand_without_gaps_up_to_the_newest_token() -> None:
    model, policy = tiny(), make_policy("finch", 20, window=6)
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, policy)
    with torch.inference_mode():
        model(torch.tensor([prompt(50)]), past_key_values=cache)
    for layer in cache.layers:
        places = layer.positions + layer.states[0].store.state["moved"][..., 0]
        assert places[0].tolist() == [[float(place) for place in range(30, 50)]] * 2


def test_it_keeps_what_kvpress_keeps() -> None:
    press = presses().FinchPress()
    press.window_size, press.rerotate_keys = 8, False  # keys that were moved would not be found again
    press.delimiter_token_id = -1  # no token: the window is given
    assert_same("finch", press, budget=24, length=70, window=8, official=True)

"""KeyDiff: the keys least like the direction they have in common stay."""

import math

import torch
from kv_crafted import drawn, observed
from kvpress_kept import assert_same, presses

from kvbench.policies.scorers.keydiff import KeyDiff


def test_a_score_is_the_cosine_with_the_mean_direction_turned_round() -> None:
    """Directions (1,0), (0,1), (0,1), whatever their lengths: the mean points to (1,2)."""
    keys = torch.tensor([[[[3.0, 0.0], [0.0, 1.0], [0.0, 5.0]]]])
    expected = torch.tensor([[[-1 / math.sqrt(5), -2 / math.sqrt(5), -2 / math.sqrt(5)]]])
    torch.testing.assert_close(KeyDiff().score(observed(keys), {}), expected)


def test_empty_slots_have_no_part_in_the_direction() -> None:
    _, keys, _ = drawn(6, 1, 2)
    whole = KeyDiff().score(observed(keys[:, :, :4]), {})
    places = torch.tensor([0, 1, 2, 3, -1, -1]).expand(1, 2, -1)
    torch.testing.assert_close(KeyDiff().score(observed(keys, positions=places), {})[..., :4], whole)


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    for budget in (31, 60):
        assert_same("keydiff", kvpress.KeyDiffPress(), budget, 90)

"""CurDKV: a token's share of the squared norms of its window."""

import pytest
import torch
from kv_crafted import observed
from kvpress_kept import assert_same, presses

from kvbench.policies.scorers.curdkv import CurDKV

KEYS = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]]])  # squared norms 1, 1 | 4
VALUES = torch.tensor([[[[3.0, 0.0], [0.0, 1.0], [5.0, 0.0]]]])  # 9, 1 | 25


@pytest.mark.parametrize(
    ("leverage", "expected"),
    [
        ("key", [0.5 / 2, 0.5 / 2, 1 / 2]),
        ("value", [0.9 / 2, 0.1 / 2, 1 / 2]),
        ("kv_avg", [0.7 / 2, 0.3 / 2, 1 / 2]),
        ("kv_product", [0.45 / 1.5, 0.05 / 1.5, 1 / 1.5]),
    ],
)
def test_scores_are_shares_of_windows_from_the_left(leverage: str, expected: list[float]) -> None:
    scorer = CurDKV(window=2, leverage=leverage, sinks=0)
    torch.testing.assert_close(scorer.score(observed(KEYS, values=VALUES), {}), torch.tensor([[expected]]))


def test_empty_slots_count_nothing_and_order_is_that_of_positions() -> None:
    places = torch.tensor([[[2, -1, 0, 1]]])
    keys, values = (x[:, :, [2, 0, 0, 1]] for x in (KEYS, VALUES))
    score = CurDKV(window=2, sinks=0).score(observed(keys, values=values, positions=places), {})
    torch.testing.assert_close(score[..., [2, 3, 0]], torch.tensor([[[0.45, 0.05, 1.0]]]) / 1.5)


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    for leverage in ("key", "value", "kv_avg", "kv_product"):
        assert_same("curdkv", kvpress.CURPress(leverage_type=leverage), 35, 90, leverage=leverage)

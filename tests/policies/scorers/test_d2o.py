"""How D2O divides a layer's slots among sinks, important and recent tokens."""

from typing import Any

import pytest

from kvbench import make_policy
from kvbench.policies.scorers.d2o import HeavyAndRecent


@pytest.mark.parametrize(
    ("scorer", "budget", "recent"),
    [
        (HeavyAndRecent(), 104, 25),  # 100 slots at 3 : 1
        (HeavyAndRecent(), 103, 24),  # floor(99 / 4)
        (HeavyAndRecent(), 6, 1),  # never less than one
        (HeavyAndRecent(n=1, m=1), 104, 50),
        (HeavyAndRecent(n=1, m=3), 104, 75),
        (HeavyAndRecent(n=2, m=1), 104, 33),
        (HeavyAndRecent(recent=2000), 2052, 2000),  # MT-bench: N = 48, M = 2000
        (HeavyAndRecent(n=1, m=1, sinks_inside=True), 104, 52),  # released code: sinks count as important
        (HeavyAndRecent(n=1, m=1, sinks_inside=True), 6, 2),  # and still fit
    ],
    ids=str,
)
def test_the_recent_window(scorer: HeavyAndRecent, budget: int, recent: int) -> None:
    assert scorer.protects(budget) == (4, recent)


def test_one_important_and_one_recent_token_is_the_least() -> None:
    make_policy("d2o", 6)
    with pytest.raises(
        ValueError, match="a budget of 5 tokens per KV head is too small for d2o: it must be at least 6"
    ):
        make_policy("d2o", 5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sinks": -1}, "sinks must be a whole number of at least 0, got -1"),
        ({"m": 0}, "m must be a whole number of at least 1, got 0"),
        ({"n": 1.5}, "n must be a whole number, got 1.5"),
        ({"recent": "half"}, "recent must be 'share' or a number of tokens >= 1, got 'half'"),
    ],
)
def test_wrong_fields_are_answered_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_policy("d2o", 64, **fields)

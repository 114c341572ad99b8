"""How D2O divides a layer's slots among sinks, important and recent tokens."""

import pytest

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
    assert scorer.protects(budget) == (4, recent, 1)

"""LagKV: a token is judged on the scale of the next partition."""

from kv_crafted import drawn, observed
from kvpress_kept import assert_same, presses

from kvbench.policies.scorers.lagkv import LagKV


def test_of_a_prompt_shorter_than_two_partitions_the_newest_stay() -> None:
    _, keys, values = drawn(20, 1, 1)
    score = LagKV(lag=9, sinks=4).score(observed(keys, values=values), {})
    assert bool((score.diff() > 0).all())


def test_kvpress_keeps_the_same_where_no_ranks_tie() -> None:
    """Of 90 tokens 4 are sinks, 22 have no reference, and of four partitions of 16 each loses as many."""
    kvpress = presses()
    for lost in (3, 9):
        assert_same("lagkv", kvpress.LagKVPress(lag_size=16), 90 - 4 * lost, 90, lag=16)

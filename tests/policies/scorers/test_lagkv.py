"""LagKV: a token is judged on the scale of the next partition."""

import math

import pytest
import torch
from kv_crafted import drawn, observed
from kvpress_kept import assert_same, presses
from torch import Tensor

from kvbench.policies.scorers.lagkv import LagKV


def relative(vectors: list[list[float]], reference: list[list[float]]) -> list[float]:
    """a of a partition's keys or values, channel by channel, by the equations."""
    spreads = []
    for vector in vectors:
        scaled = []
        for channel, x in enumerate(vector):
            least, most = (pick(row[channel] for row in reference) for pick in (min, max))
            scaled.append((x - least) / (most - least))
        mean = sum(scaled) / len(scaled)
        spreads.append(math.exp(math.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1))))
    return [spread / sum(spreads) for spread in spreads]


def by_hand(keys: Tensor, values: Tensor, lag: int, sinks: int) -> dict[int, float]:
    """The scores of one head's tokens that have a reference, by position."""
    found: dict[int, float] = {}
    for first in range(sinks, len(keys) - 2 * lag + 1, lag):
        a = [
            relative(x[first : first + lag].tolist(), x[first + lag : first + 2 * lag].tolist()) for x in (keys, values)
        ]
        means = [(k + v) / 2 for k, v in zip(*a, strict=True)]
        found |= {first + i: sum(other < mean for other in means) / lag for i, mean in enumerate(means)}
    return found


def test_scores_are_ranks_within_a_partition_and_what_has_no_reference_is_above_them() -> None:
    _, keys, values = drawn(23, 1, 2)
    score = LagKV(lag=5, sinks=2).score(observed(keys, values=values), {})
    for head in range(2):
        expected = by_hand(keys[0, head], values[0, head], lag=5, sinks=2)
        assert sorted(expected) == [*range(2, 17)]
        assert {i: pytest.approx(float(score[0, head, i])) for i in expected} == expected
        rest = score[0, head, 17:].tolist()
        assert rest == sorted(rest)
        assert rest[0] >= 1


def test_of_a_prompt_shorter_than_two_partitions_the_newest_stay() -> None:
    _, keys, values = drawn(20, 1, 1)
    score = LagKV(lag=9, sinks=4).score(observed(keys, values=values), {})
    assert bool((score.diff() > 0).all())


def test_heads_that_hold_different_tokens_are_judged_each_by_its_own() -> None:
    _, keys, values = drawn(20, 1, 1)
    places = torch.arange(20)[None, None]
    held = torch.where(places < 15, places, -1)
    short = LagKV(lag=5, sinks=0).score(observed(keys[:, :, :15], values=values[:, :, :15]), {})
    score = LagKV(lag=5, sinks=0).score(observed(keys, values=values, positions=held, seen=20), {})
    torch.testing.assert_close(score[..., :10], short[..., :10])
    assert bool((score[..., 10:15] >= 1).all())


def test_kvpress_keeps_the_same_where_no_ranks_tie() -> None:
    """Of 90 tokens 4 are sinks, 22 have no reference, and of four partitions of 16 each loses as many."""
    kvpress = presses()
    for lost in (3, 9):
        assert_same("lagkv", kvpress.LagKVPress(lag_size=16), 90 - 4 * lost, 90, lag=16)

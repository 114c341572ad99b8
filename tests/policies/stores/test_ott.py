"""OTT against its worked example, against a slow version of its definition, and in what it promises."""

import dataclasses
from typing import Any

import pytest
import torch
from kv_stores import attended, feed, stream

from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.ring_layout import RingLayer

KEYS = torch.tensor([[[[0.0, 2], [34, 0], [35, 2], [39, -4], [30, 2], [0, 1], [36, 7], [42, -2], [31, 3]]]])
VALUES = torch.tensor([[[[4.0, 0], [1, 3], [2, -1], [-3, 2], [0, 6], [8, -8], [5, 1], [-1, 1], [2, 2]]]])
QUERY = torch.tensor([[[[0.1, 0.2]]]])
TINY = Ott(group=4, residual=1, outliers=1, auxiliary=1)
SPLITS = [[1] * 9, [9], [4, 5], [6, 1, 1, 1]]


def coded(held: RingLayer, side: int) -> Any:
    """The tokens that the codes of the first head stand for, without the pools."""
    return held.dequantised(side, 0, held.in_codes[side])[0, 0].tolist()


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_the_worked_example_comes_out_to_the_last_digit(splits: list[int]) -> None:
    held = feed(TINY, KEYS, VALUES, splits)
    keys = coded(held, 0)
    assert keys == [[27, 0], [35, 0], [35, 2], [39, -4], [32, 1], [27, 1], [37, 7], [42, -2]]
    values = coded(held, 1)
    assert values == [[1, 1], [1, 3], [2, -1], [-3, 2], [0, 6], [3, 0], [5, 1], [-1, 1]]
    assert held.notes["pool slots"].tolist() == [[[5, 0]]]
    assert held.notes["frozen"].tolist() == [[False]]
    assert held.notes["pool keys"][0, 0].tolist() == [[0, 1], [0, 2]]
    out = attended(held, QUERY, 8)[0, 0, 0]
    torch.testing.assert_close(out, torch.tensor([1.975720, 1.507370]), rtol=0, atol=5e-7)


def test_the_mean_of_the_inliers_can_stand_in_instead() -> None:
    held = feed(dataclasses.replace(TINY, fill="inlier_mean"), KEYS[:, :, :5], VALUES[:, :, :5])
    torch.testing.assert_close(held.memory["keys scale"][0, 0, 0], torch.tensor([5 / 3, 2]))
    assert held.memory["keys minimum"][0, 0, 0].tolist() == [34, -4]
    expected = [[34 + 5 / 3, 0], [34, 0], [34 + 5 / 3, 2], [39, -4]]
    torch.testing.assert_close(torch.tensor(coded(held, 0)), torch.tensor(expected))


@pytest.mark.parametrize("splits", [[24], [1] * 24, [4] * 6])
def test_pools_freeze_before_the_auxiliary_one_would_overflow(splits: list[int]) -> None:
    scores = [5, 9, 1, 8, 7, 2, 6, 9, 9, 8, 7, 6, 0, 3, 9, 9, 8, 0.5, 9, 9, 0.1, 0.2, 9, 9]
    keys = torch.tensor(scores).view(1, 1, 24, 1)
    store = Ott(group=4, residual=0, outliers=2, auxiliary=3)
    pools = [[2, 0, -1, -1, -1], [2, 5, 0, -1, -1], [2, 5, 0, -1, -1], [12, 2, 0, 5, -1], [12, 17, 0, 5, 2]]
    for groups, slots in enumerate(pools, start=1):
        held = feed(store, keys[:, :, : 4 * groups], keys[:, :, : 4 * groups])
        assert held.notes["pool slots"].tolist() == [[slots]]
        assert not bool(held.notes["frozen"])
    held = feed(store, keys, keys, splits)
    assert held.notes["pool slots"].tolist() == [[pools[-1]]]
    assert bool(held.notes["frozen"])


def test_the_first_two_layers_trace_nothing() -> None:
    store = Ott(group=32, residual=0)
    keys, values = stream(64)
    assert [feed(store.for_layer(i), keys, values).notes == {} for i in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert feed(dataclasses.replace(store, skip_layers=()).for_layer(0), keys, values).notes


@pytest.mark.parametrize("trace", ["smallest", "largest", "random"])
def test_other_choices_of_exact_tokens_exist_for_comparison(trace: str) -> None:
    keys, values = stream(64, heads=2)
    held = feed(Ott(group=64, residual=0, outliers=4, trace=trace), keys, values)
    norms = keys.abs().sum(-1)
    order = norms.argsort(-1, descending=trace == "largest")[..., :4]
    chosen = held.notes["pool slots"][..., :4].long().sort(-1).values
    assert torch.equal(chosen, order.sort(-1).values) == (trace != "random")
    assert torch.equal(
        held.keys.gather(2, chosen[..., None].expand(-1, -1, -1, 16)),
        keys.gather(2, chosen[..., None].expand(-1, -1, -1, 16)),
    )


def test_heads_trace_own_tokens_unless_shared() -> None:
    keys, values = stream(64, heads=3)
    own = feed(Ott(group=64, residual=0), keys, values).notes["pool slots"][..., :3]
    shared = feed(Ott(group=64, residual=0, pool_scope="layer"), keys, values).notes["pool slots"][..., :3]
    assert len({tuple(head) for head in own[0].tolist()}) == 3
    assert len({tuple(head) for head in shared[0].tolist()}) == 1
    assert shared[0, 0].tolist() == keys.abs().sum(-1).sum(1)[0].argsort()[:3].tolist()

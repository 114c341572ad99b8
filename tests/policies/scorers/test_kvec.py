"""K-VEC's corrections of window scores: the worked example of its specification, and laws."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_crafted import observed
from torch import Tensor

from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Prompt
from kvbench.policies.scorers.kvec import KVec
from kvbench.policies.step_info import SlotInfo

# Two layers, two KV heads of two query heads, eight tokens. A key is (ln a, ln b), a query (1,0) = U or (0,1) = V times
# sqrt(2), so that the attention weight is proportional to a or to b.
KEYS = [
    [([2, 1, 2, 1, 1, 3, 1, 1], [1, 4, 1, 1, 3, 1, 1, 1]), ([1] * 8, [1, 2, 1, 1, 1, 4, 1, 1])],
    [([2, 4, 1, 1, 1, 3, 1, 1], [2, 1, 3, 1, 1, 2, 1, 1]), ([1, 4, 1, 1, 1, 1, 1, 1], [1, 4, 1, 1, 4, 3, 1, 1])],
]
QUERIES = [["VUVV", "VUVU", "VVVV", "VUUU"], ["VVUU", "UVVV", "UVVU", "VVVV"]]


def observation(layer: int, shared: dict[str, Tensor]) -> Observation:
    keys = torch.tensor(KEYS[layer], dtype=torch.float64).log().transpose(-1, -2)[None]  # [1,2,8,2]
    unit = {"U": [math.sqrt(2), 0.0], "V": [0.0, math.sqrt(2)]}
    queries = torch.tensor([[unit[letter] for letter in head] for head in QUERIES[layer]], dtype=torch.float64)[None]
    window: dict[str, Any] = {"recent_queries": queries, "recent_positions": torch.arange(4, 8)[None]}
    return observed(keys, queries, layer=layer, scaling=1 / math.sqrt(2), budgets=(4,), shared=shared, **window)


def kept(**fields: Any) -> list[list[set[int]]]:
    """Candidates (tokens 0..5) kept per layer and KV head at budget 4."""
    scorer = KVec(**{"window": 2, "extended": 4, "delta": 1, "pool": "none", **fields})
    policy = Policy(scorer=scorer, allocator=Uniform(), schedule=Prompt(decode="grow"), budget=4, name="kvec")
    shared: dict[str, Tensor] = {}
    sets = []
    for layer in range(2):
        seen = observation(layer, shared)
        mask = policy.rank(seen, {}).select(4)
        scorer.selected(seen, mask)
        sets.append([{int(p) for p in head.nonzero() if p < 6} for head in mask[0]])
    return sets


def test_scores_of_the_worked_example_to_the_last_digit() -> None:
    scorer = KVec(window=2, extended=4, delta=1, pool="none")
    shared: dict[str, Tensor] = {}
    first = observation(0, shared)
    scores = scorer.score(first, {})[0, :, :6]
    inf = math.inf
    expected = torch.tensor(
        [
            [0.221903, inf, 0.221903, 0.192256, 127 / 312, 0.364604],
            [0.249601, inf, 0.249601, 0.240787, 0.333788, 0.432643],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(scores, expected, atol=5e-7, rtol=0)
    mask = torch.tensor([[[0, 1, 0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 1, 1, 1]]], dtype=torch.bool)
    scorer.selected(first, mask)
    second = scorer.score(observation(1, shared), {})[0, :, :6]
    expected = torch.tensor(
        [
            [0.350973, 0.335508, inf, 0.175487, 0.204118, 0.248385],
            [0.232983, inf, 0.239455, 0.152334, 577 / 1760, 0.268795],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(second, expected, atol=5e-7, rtol=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [[{1, 4}, {1, 5}], [{0, 2}, {1, 4}]]),
        ({"preserve": "literal"}, [[{1, 4}, {1, 5}], [{0, 2}, {1, 4}]]),
        ({"lam": 0.0, "beta": 0.0}, [[{1, 4}, {1, 5}], [{1, 2}, {1, 4}]]),
        ({"delta": 0}, [[{1, 4}, {1, 5}], [{2, 5}, {1, 4}]]),
        ({"delta": 0, "lam": 0.0, "beta": 0.0}, [[{1, 4}, {1, 5}], [{1, 5}, {1, 4}]]),
        ({"pool": "before", "kernel": 3}, [[{0, 1}, {0, 1}], [{1, 2}, {0, 2}]]),
        ({"pool": "before", "kernel": 3, "delta": 0, "lam": 0.0, "beta": 0.0}, [[{0, 1}, {4, 5}], [{4, 5}, {0, 1}]]),
    ],
)
def test_kept_sets_of_the_worked_example_and_its_ablations(
    fields: dict[str, Any], expected: list[list[set[int]]]
) -> None:
    assert kept(**fields) == expected


@pytest.mark.parametrize("fields", [{}, {"pool": "before", "kernel": 3}, {"pool": "after", "kernel": 3}, {"beta": 0.0}])
def test_decoding_scores_tokens_by_position_wherever_each_head_holds_them(fields: dict[str, Any]) -> None:
    scorer = KVec(**{"window": 2, "extended": 4, "delta": 1, "pool": "none", **fields})
    torch.manual_seed(3)
    told: list[dict[str, Tensor]] = [{}, {}]
    for layer in range(2):
        whole = observation(layer, told[0])
        order = torch.stack([torch.randperm(8), torch.randperm(8)])[None]
        keys, positions = whole.keys.gather(2, order[..., None].expand_as(whole.keys)), whole.positions.gather(2, order)
        slots = SlotInfo(ascending=False, packed=True, whole=False)
        moved = {"keys": keys, "positions": positions, "slots": slots, "known": {}}
        decoding = replace(whole, phase="decode", shared=told[1], **moved)
        expected, got = scorer.score(whole, {}), scorer.score(decoding, {})
        torch.testing.assert_close(got, expected.gather(2, order), atol=1e-12, rtol=0)
        kept = torch.rand(1, 2, 8) < 0.5
        scorer.selected(whole, kept)
        scorer.selected(decoding, kept.gather(2, order))

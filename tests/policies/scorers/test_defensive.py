"""DefensiveKV and Layer-DefensiveKV, against numbers worked by hand and kept sets of the original code."""

from typing import Any

import pytest
import torch
from golden import Case, cases
from kv_crafted import windowed
from kv_models import Projects

from kvbench import make_policy
from kvbench.policies.allocators.allocator import JointAllocator
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.defensive import Defensive


def worked(budget: int = 4) -> Observation:
    """One KV head of two query heads; the same norm of every value."""
    queries = torch.tensor([[[1.0, 0], [0, 1]], [[0, 0], [2, 0]]])
    keys = torch.tensor([[[3.0, 0], [0, 3], [1, 0], [0, 1], [-1, 0], [0, -1], [0, 0], [0, 0]]])
    return windowed(queries, keys, torch.ones_like(keys), budget, Projects(torch.eye(2).expand(2, 2, 2)))


def test_the_worst_case_and_its_lower_bound() -> None:
    largest = Defensive(window=2, kernel=1, floor=False).score(worked(), {})[0, 0, :6]
    torch.testing.assert_close(largest, torch.tensor([0.8815, 0.5259, *[0.1429] * 4]), rtol=0, atol=1e-4)
    bounded = Defensive(window=2, kernel=1).score(worked(), {})[0, 0, :6]
    torch.testing.assert_close(bounded, torch.tensor([0.8815, 0.5259, *[0.3298] * 4]), rtol=0, atol=1e-4)
    mean = Defensive(window=2, kernel=1, aggregate="mean", floor=False).score(worked(), {})[0, 0, :6]
    a = torch.tensor([0.4531, 0.2058, 0.1084, 0.0964, 0.0666, 0.0698])
    torch.testing.assert_close(mean / mean.sum(), a, rtol=0, atol=1e-4)


@pytest.mark.parametrize("official", [True, False])
def test_pinned_tokens_are_capped_and_precede_all_others(official: bool) -> None:
    policy = make_policy("defensivekv", 4, kernel=1, official=official, **{"scorer.window": 2})
    ranking = policy.rank(worked(), {})
    assert ranking.select(4)[0, 0].nonzero().flatten().tolist() == [0, 1, 6, 7]
    # The same norm of every value: n is 1 over heads, 1/6 over tokens. One of three tokens below the mass is pinned.
    scale, pinned = (1, 0.8815) if official else (6, 2 * 0.8815 + 6)
    expected = [pinned, 0.5259, *[0.3298] * 4]
    torch.testing.assert_close(ranking.scores[0, 0, :6] * scale, torch.tensor(expected), rtol=0, atol=1e-3)


def test_pooled_attention_has_the_sum_of_the_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 20)))
    seen = windowed(queries, keys, keys, 8, Projects(torch.eye(8).expand(4, 8, 8)))
    pooled = Defensive(window=3, aggregate="mean", floor=False).score(seen, {})[..., :17]
    drawn = seen.window_mean(3)[..., :17] / 3
    torch.testing.assert_close(pooled.sum(-1), drawn.sum(-1))
    assert float((pooled - drawn).abs().max()) > 0.01


def fields(case: Case) -> dict[str, Any]:
    return {"scorer.window": case["window"], "kernel": case["kernel"], "official": True}


def rankings(policy: Policy, case: Case) -> list[Any]:
    of_layers = zip(case["queries"], case["keys"], case["values"], case["o_proj"], strict=True)
    seen = (windowed(q, k, v, case["budget"], Projects(o.T.unflatten(0, (case["Hq"], -1)))) for q, k, v, o in of_layers)
    return [policy.rank(one, {}) for one in seen]


def test_the_original_code_scores_and_keeps_the_same() -> None:
    for case in cases("defensivekv.npz"):
        own, joint = (make_policy(n, case["budget"], **fields(case)) for n in ("defensivekv", "layer_defensivekv"))
        ranked, before = rankings(own, case), case["T"] - case["window"]
        for found, score, kept in zip(ranked, case["score"], case["kept_defensive"], strict=True):
            torch.testing.assert_close(found.scores[0, :, :before], score[:, :before], rtol=1e-4, atol=1e-6)
            counts = own.allocator.heads(0, found, [case["budget"]])
            assert torch.equal(found.select(counts)[0], kept), case["name"]
        assert isinstance(joint.allocator, JointAllocator)
        counts_of_all = joint.allocator.heads_of_all(ranked, [[case["budget"]]] * case["layers"])
        for found, counts, kept in zip(ranked, counts_of_all, case["kept_layer"], strict=True):
            assert torch.equal(found.select(counts)[0], kept), case["name"]

"""CriticalKV: half of the budget by scores, half by what the output projection makes of the values."""

import torch
from kv_crafted import observed
from kv_models import Projects
from kvpress_kept import assert_same, presses

from kvbench.policies.observation import Observation
from kvbench.policies.scorers.snapkv import SnapKV
from kvbench.policies.values.critical import Critical, projected_norms


def seen(budget: int) -> Observation:
    """One KV head of two query heads; values whose projections have L1 norms 1, 2, 4, 8 and 3, 6, 12, 24."""
    matrices = torch.zeros(2, 2, 3)
    matrices[0, 0], matrices[1, 0] = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, -1.0, 1.0])
    values = torch.tensor([[[[1.0, 9.0], [-2.0, 9.0], [4.0, 9.0], [8.0, 9.0]]]])
    keys, queries = torch.zeros(1, 1, 4, 2), torch.zeros(1, 2, 1, 2)
    return observed(keys, queries, values=values, model=Projects(matrices), budgets=(budget,), phase="decode")


def scored(critical: Critical, scores: list[float], budget: int) -> list[float]:
    nothing = torch.zeros(1, 1, 4, dtype=torch.bool)
    found = critical.score(SnapKV(window=1), torch.tensor([[scores]]), seen(budget), {}, nothing, layer_wide=False)
    return [float(x) for x in found[0, 0]]


def test_norms_are_means_over_the_group() -> None:
    assert projected_norms(seen(2)).tolist() == [[[2.0, 4.0, 8.0, 16.0]]]


def test_scores_are_weighed_once_the_first_half_is_chosen() -> None:
    found = scored(Critical(epsilon=1.0), [5.0, 1.0, 2.0, 0.0], budget=3)  # one of three by the score alone
    assert found[1:] == [(1 + 1) * 4, (2 + 1) * 8, (0 + 1) * 16]
    assert found[0] > max(found[1:])


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    for budget in (34, 61):
        press = kvpress.CriticalKVPress(kvpress.SnapKVPress(window_size=8, kernel_size=5))
        assert_same("critical_snapkv", press, budget, 90, window=8, kernel=5, pool="avg")
        assert_same("critical_knorm", kvpress.CriticalKVPress(kvpress.KnormPress()), budget, 90)

"""CriticalKV: half of the budget by scores, half by what the output projection makes of the values."""

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt
from kv_runs import run_greedy
from kvpress_kept import assert_same, policy_keeps, presses, small
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.model_layer import Rotation
from kvbench.policies.observation import Observation
from kvbench.policies.scorers.snapkv import SnapKV
from kvbench.policies.values.critical import Critical


class Projects:
    """A model's layer with an output projection of its own."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices

    def rotation(self, positions: Tensor) -> Rotation:
        raise AssertionError("not asked")

    def output_projection(self) -> Tensor:
        return self._matrices


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
    assert Critical().projected_norms(seen(2)).tolist() == [[[2.0, 4.0, 8.0, 16.0]]]


def test_scores_are_weighed_once_the_first_half_is_chosen() -> None:
    found = scored(Critical(epsilon=1.0), [5.0, 1.0, 2.0, 0.0], budget=3)  # one of three by the score alone
    assert found[1:] == [(1 + 1) * 4, (2 + 1) * 8, (0 + 1) * 16]
    assert found[0] > max(found[1:])


def test_with_no_first_stage_all_are_weighed() -> None:
    assert scored(Critical(epsilon=0.0, first=0.0), [5.0, 1.0, 2.0, 0.0], budget=4) == [10.0, 4.0, 16.0, 0.0]


@pytest.mark.parametrize("slug", ["critical_snapkv", "critical_knorm", "critical_h2o", "ada_critical_snapkv"])
def test_the_budget_holds_around_any_scorer(slug: str) -> None:
    model = small("qwen3")
    run = run_greedy(model, [prompt(60)], make_policy(slug, 40), 3)
    assert run.cache is not None
    grown = 2 if run.cache.policy.schedule.decode == "grow" else 0
    assert int(run.cache.kept_tokens().sum()) == (40 + grown) * 2 * 2


def test_rows_of_a_padded_batch_keep_what_they_keep_alone() -> None:
    model, ids = small("llama"), [prompt(60), prompt(47, seed=1)]
    batch = run_greedy(model, ids, make_policy("critical_snapkv", 40), 3)
    for row, own in enumerate(ids):
        assert batch.of_row(row)[-3:] == run_greedy(model, [own], make_policy("critical_snapkv", 40), 3).of_row(0)[-3:]


def test_other_tokens_stay_than_without_it() -> None:
    model, ids = small("llama"), prompt(90)
    assert policy_keeps(model, ids, make_policy("critical_snapkv", 40)) != policy_keeps(
        model, ids, make_policy("snapkv", 40)
    )


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    for budget in (34, 61):
        press = kvpress.CriticalKVPress(kvpress.SnapKVPress(window_size=8, kernel_size=5))
        assert_same("critical_snapkv", press, budget, 90, window=8, kernel=5, pool="avg")
        assert_same("critical_knorm", kvpress.CriticalKVPress(kvpress.KnormPress()), budget, 90)

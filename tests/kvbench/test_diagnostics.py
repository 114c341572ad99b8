"""Diagnostics: the numbers by hand on a tiny random model, and the command on wrong values."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from kv_hybrids import tiny_hybrid
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.policies.values.caote import Caote
from kvbench.tools.diagnostics import allocation, attention_statistics, coverage, joint_error, output_error, retention
from kvbench.tools.diagnostics.probe import Probe


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return prepare(LlamaForCausalLM(config).eval())


def probe(model: PreTrainedModel, slug: str, budget: int, **fields: object) -> Probe:
    ids = torch.randint(1, 301, (1, 90), generator=torch.Generator().manual_seed(1))
    return Probe(model, ids, make_policy(slug, budget, **fields), slug, new_tokens=4)  # type: ignore[arg-type]


def test_coverage_of_a_local_window_is_the_window(model: PreTrainedModel) -> None:
    rows = coverage.measure(probe(model, "local_window", 9))
    assert rows[0]["coverage"] == pytest.approx(100 * 9 / 90)
    assert [row["budget"] for row in rows[1:]] == [68, 45, 22, 9]  # round((1 - rate) * 90)
    assert all(row["coverage"] == pytest.approx(100 * int(str(row["budget"])) / 90) for row in rows)


def test_a_policy_that_asks_for_the_question_is_told_it(model: PreTrainedModel) -> None:
    asking = replace(probe(model, "finch", 20), question=85)
    kept = asking.prefilled().layers[0].positions[0]
    assert all(set(range(85, 90)) <= set(head) for head in kept.tolist())
    assert {len(head) for head in kept.tolist()} == {20}


def test_output_error_is_nothing_where_nothing_is_evicted_and_local_in_layer_0_equals_free(
    model: PreTrainedModel,
) -> None:
    none = output_error.measure(probe(model, "snapkv", 90))
    assert all(float(str(row["free"])) < 1e-9 for row in none)
    rows = output_error.measure(probe(model, "h2o", 16))
    assert rows[0]["free"] == pytest.approx(rows[0]["local"], rel=1e-3)
    assert all(float(str(row["local"])) > 1e-4 for row in rows)


def test_the_joint_error_of_one_token_is_its_caote_score() -> None:
    torch.manual_seed(0)
    alpha, values = torch.rand(2, 7, dtype=torch.float64).softmax(-1), torch.randn(2, 7, 3, dtype=torch.float64)
    one = torch.zeros(2, 7, dtype=torch.bool)
    one[:, 4] = True
    joint, single = joint_error.joint_error(alpha, values, one)
    score = Caote().eviction_error(alpha[None, :, None], values[None], torch.ones(1, 2, 7, dtype=torch.bool))[
        0, :, 0, 4
    ]
    torch.testing.assert_close(joint, score)
    torch.testing.assert_close(single, score)


def test_the_joint_error_of_two_tokens_by_hand() -> None:
    # CAOTE's example A: evicting tokens 3 and 4 together costs 0.384615, their scores sum to 0.426471.
    alpha = torch.tensor([[6.0, 5, 4, 3, 2]], dtype=torch.float64) / 20
    values = torch.tensor([[[1.0, 0], [-3, 5], [2, 2], [1, 1], [9, 2]]], dtype=torch.float64)
    evicted = torch.tensor([[False, False, True, True, False]])
    joint, single = joint_error.joint_error(alpha, values, evicted)
    assert float(joint) == pytest.approx(0.384615, abs=5e-7)
    assert float(single) == pytest.approx(0.426471, abs=5e-7)


@pytest.mark.parametrize("module", [coverage, retention, allocation, output_error, attention_statistics])
def test_every_diagnostic_draws(model: PreTrainedModel, module: object) -> None:
    table = pd.DataFrame(module.measure(probe(model, "snapkv", 40)))  # type: ignore[attr-defined]
    figure = Figure()
    module.draw(table.assign(policy="snapkv", example=0), figure)  # type: ignore[attr-defined]
    assert figure.axes


@pytest.mark.parametrize(("running", "attention"), [(tiny_hybrid("qwen3_5_text"), 2)])
def test_output_error_is_of_attention_layers_alone(running: PreTrainedModel, attention: int) -> None:
    rows = output_error.measure(probe(prepare(running), "snapkv", 40))
    assert [row["layer"] for row in rows] == list(range(attention))

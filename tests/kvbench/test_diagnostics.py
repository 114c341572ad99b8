"""Diagnostics: the numbers by hand on a tiny random model, and the command on wrong values."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from kv_models import tiny
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.tools.diagnostics import coverage, output_error
from kvbench.tools.diagnostics.probe import Probe


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return prepare(tiny(layers=3, dtype=torch.float32))


def probe(model: PreTrainedModel, slug: str, budget: int, **fields: object) -> Probe:
    ids = torch.randint(1, 301, (1, 90), generator=torch.Generator().manual_seed(1))
    return Probe(model, ids, make_policy(slug, budget, **fields), slug, new_tokens=4)


def test_a_policy_that_needs_the_question_receives_it(model: PreTrainedModel) -> None:
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


@pytest.mark.parametrize("module", [coverage, output_error])
def test_every_diagnostic_draws(model: PreTrainedModel, module: object) -> None:
    table = pd.DataFrame(module.measure(probe(model, "snapkv", 40)))
    figure = Figure()
    module.draw(table.assign(policy="snapkv", example=0), figure)
    assert figure.axes

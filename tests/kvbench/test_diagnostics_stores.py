"""Diagnostics of stores: errors by hand, and OTT's figure 1(c) where what it describes is planted."""

import numpy as np
import pytest
import torch
from kv_models import prompt
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.policies.observation import AttentionParams, Observation
from kvbench.policies.stores.ott import Ott
from kvbench.tools.diagnostics import exact_tokens
from kvbench.tools.diagnostics.probe import Probe


def probe(model: PreTrainedModel, slug: str, **fields: object) -> Probe:
    return Probe(model, torch.tensor([prompt(96)]), make_policy(slug, **fields), slug)


def test_errors_are_those_of_the_formula(model: PreTrainedModel) -> None:
    for layer in exact_tokens.record(probe(model, "kivi", group=32, residual=0)):
        keys = layer.keys[0].double().numpy()  # [H,96,D]
        lost = 0.0
        for group in keys.reshape(keys.shape[0], 3, 32, -1).swapaxes(2, 3).reshape(-1, 32):
            step = (group.max() - group.min()) / 3
            lost += np.abs(np.round((group - group.min()) / step) * step + group.min() - group).sum()
        errors = exact_tokens.errors(layer, make_policy("kivi", group=32, residual=0).store)
        assert errors["keys"] == pytest.approx(lost / np.abs(keys).sum(), rel=1e-5)


def planted() -> Observation:
    """A layer with a channel of huge keys, which tell tokens apart, that three tokens lack; values fit two bits."""
    torch.manual_seed(0)
    keys, values, queries = (
        0.1 * torch.randn(1, 2, 128, 16),
        torch.randn(1, 2, 128, 16).sign(),
        torch.randn(1, 4, 128, 16),
    )
    keys[..., 3] = 40 + torch.randn(1, 2, 128)
    keys[:, :, [20, 50, 90]] *= 0.01
    positions = torch.arange(128)
    return Observation(
        layer=2,
        queries=queries,
        query_positions=positions[None],
        keys=keys,
        values=values,
        positions=positions.expand(1, 2, -1),
        seen=torch.tensor([128]),
        phase="prompt",
        params=AttentionParams(0.25),
    )


def test_the_smallest_keys_are_worth_keeping_where_they_stretch_the_range_of_the_others() -> None:
    def error(trace: str, count: int) -> float:
        store = exact_tokens._keeping(Ott(group=128, residual=0), trace, count)
        return exact_tokens.errors(planted(), store)["attention"]

    none = error("smallest", 0)
    assert error("largest", 0) == error("random", 0) == none
    assert error("smallest", 3) < 0.5 * none
    assert error("largest", 3) > 0.8 * none
    assert error("smallest", 3) < 0.5 * error("random", 3)

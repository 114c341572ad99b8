"""Numbers that a fixed scale cannot hold are counted, alone as in a batch, shown in tables and warned of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import ended

import kvbench
from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.answers import clipped
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.report.table import results_table

SCALES: dict[str, Any] = {"store.key_scales": [0.001, 0.002], "store.value_scales": [0.002, 0.001]}
LIMITS = [0.448, 0.896], [0.896, 0.448]


def asked(length: int, new: int) -> Request:
    return Request(script_of(torch.tensor([prompt(length, length)])), max_new_tokens=new, encoder=CodePoints())


def test_a_prompt_counts_each_number_once() -> None:
    model = prepare(tiny("llama", dtype=torch.float32))
    ids = torch.tensor([prompt(40)])
    full = generate_tokens(model, ids, make_policy("full"), max_new_tokens=1).cache
    codes = generate_tokens(model, ids, make_policy("fp8", **SCALES), max_new_tokens=1).cache
    expected = sum(
        int((layer.keys.abs() > keys).sum() + (layer.values.abs() > values).sum())
        for layer, keys, values in zip(full.attention_layers, *LIMITS, strict=True)
    )
    assert clipped(codes.sequence.layers) == expected > 0


@pytest.mark.parametrize("name", ["fp8", "snapkv_fp8", "h2o_fp8", "nvfp4"])
def test_a_sequence_counts_in_a_batch_what_it_counts_alone(name: str) -> None:
    model = prepare(tiny("llama", query_heads=2, dtype=torch.float64))  # so that a batch changes no number
    policy = make_policy(name, 36, **SCALES)
    found = []
    for requests in ([asked(50, 9), asked(60, 5)], [asked(50, 9)], [asked(60, 5)]):
        found.append([clipped(row.held.layers) for row in ended(model, requests, [policy])])
    assert found[0] == found[1] + found[2]
    short = [clipped(row.held.layers) for row in ended(model, [asked(50, 3)], [policy])]
    assert 0 < short[0] < found[1][0], "decoded tokens count too"


def test_a_run_that_clips_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"task.lengths": [200], "task.max_new_tokens": 4}
    call: dict[str, Any] = {"tasks": ["niah"], "limit": 2, "out": str(tmp_path), **fields}
    fits, full = kvbench.evaluate("pocket", policies=["fp8", "full"], **call)
    assert (fits.clipped, full.clipped) == (0, None)
    assert not [one for one in caplog.messages if "clipped" in one]
    (row,) = kvbench.evaluate("pocket", policies=["fp8"], **{"policy.store.key_scales": [1e-4] * 4}, **call)
    assert row.clipped == sum(sample.clipped or 0 for sample in row.samples) > 1000
    (warning,) = [one for one in caplog.messages if "clipped" in one]
    assert warning.startswith(f"{row.run_id}: {row.clipped:g} numbers of keys and values are beyond the store's fixed")
    assert results_table([row, full]).frame["clipped"].tolist() == [f"{row.clipped:g}", "-"]
    assert "clipped" not in results_table([fits, full]).frame.columns

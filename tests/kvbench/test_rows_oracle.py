"""Rows against the slow oracle, which shares no code with them: one sequence, plain lists, nothing read for two."""

from __future__ import annotations

from dataclasses import replace

import torch
from kv_models import prompt, tiny
from kv_oracle import Rules
from kv_runs import kept_now, policy_for
from kv_simulate import simulate

from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request

NEW, BUDGET = 6, 16
LENGTHS = (37, 23, 12)  # the last fits the budget when it comes, and grows beyond it
WHOLE = [
    Rules("tova"),
    Rules("h2o", half_recent=True),
    Rules("knorm", decode="grow"),
    Rules("streamingllm"),
    Rules("snapkv", window=6, kernel=3),
    Rules("tova", value="caote"),
    Rules("snapkv", value="fastcaote", window=6, kernel=3),
]
IN_BLOCKS = [
    replace(rules, block=8) for rules in (Rules("h2o"), Rules("tova"), Rules("snapkv", value="caote", window=6))
]


def test_a_batch_equals_the_slow_oracle() -> None:
    """Variants that share a reading, whole or in blocks, and examples that enter while others decode."""
    model = tiny("gemma2")
    every = [replace(rules, budget=BUDGET) for rules in WHOLE + IN_BLOCKS]
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    traces = [[simulate(model, ids, NEW, rules) for rules in every] for ids in prompts]
    assert min(trace.margin() for some in traces for trace in some) > 1e-9, "two scores nearly tie"
    model.set_attn_implementation("kvbench")
    flight, found = DecodeBatch(model), []
    for ids in prompts:
        found.append(flight.admit(Request(torch.tensor([ids]), NEW), [policy_for(rules) for rules in every]))
        flight.step()
    while flight.in_flight:
        flight.step()
    for some, expected in zip(found, traces, strict=True):
        assert some[0].sharing == len(WHOLE)
        for row, trace, rules in zip(some, expected, every, strict=True):
            assert row.error is None
            assert row.tokens == trace.tokens, rules
            assert kept_now(row.cache)[0] == trace.kept[-1], rules

"""The KV footprint: the worked numbers of its definition, and what runs record."""

from pathlib import Path

import pytest

from kvbench import evaluate
from kvbench.cache.footprint import decoded, fed


def test_the_worked_numbers() -> None:
    prompt, new, budget, block = 4096, 128, 512, 256
    full = fed(0, prompt + new)
    assert full == 8_923_200
    assert fed(0, prompt) + decoded(budget, new, new) == 8_464_448  # eviction after the prompt, decode=grow
    blocks = sum(fed(min(budget, block * i), block) for i in range(prompt // block))
    assert blocks + decoded(budget, new, 0) == 2_492_544  # blocks, decode=evict
    assert decoded(10, 5, 2) == 11 + 12 + 13 + 13 + 13


@pytest.mark.parametrize("rows", [1, 4])
def test_runs_record_the_entries_of_every_call(rows: int, tmp_path: Path) -> None:
    policies = ["full", "snapkv", "tova", "caote_h2o", "ada_snapkv", "kvzip"]
    fields = {"task.lengths": [300], "task.max_new_tokens": 12}
    runs = evaluate("pocket", policies=policies, budgets=64, limit=1, out=tmp_path, batch=rows, **fields)
    found = {run.policy: run.samples[0] for run in runs}
    for policy, sample in found.items():
        prompt, steps, pre_pass = sample.prompt_tokens, sample.decode_steps or 0, sample.pre_pass_tokens or 0
        entries = {
            "full": fed(0, prompt + steps),
            "tova": fed(0, prompt) + decoded(64, steps, 0),
            "caote_h2o": sum(fed(min(64, i), min(128, prompt - i)) for i in range(0, prompt, 128))
            + decoded(64, steps, 0),
            "kvzip": fed(0, prompt) + fed(prompt, pre_pass) + decoded(64, steps, steps),  # a short prompt: one pass
        }.get(policy, fed(0, prompt) + decoded(64, steps, steps))
        assert sample.kv_footprint == pytest.approx(entries / fed(0, prompt + steps), rel=1e-12), policy
        assert sample.finish_reason == ("length" if sample.generated_tokens == 12 else "stop")

"""Blocks of several prompts are rows of one call of the model; every prompt equals itself alone."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import assert_alone, finish
from small_cells import cells_of, results

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.compute import compute_runs
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.policies.policy import Policy

LENGTHS, BLOCK = (70, 96, 48, 130), 16


def policies() -> list[Policy]:
    small = {"window": 6}
    return [
        make_policy(slug, budget, schedule="blocks", block=BLOCK, **(small if slug.endswith("snapkv") else {}))
        for slug, budget in (
            ("caote_snapkv", 40),
            ("h2o", 40),
            ("snapkv", 24),
            ("streamingllm", 0.5),
            ("ada_snapkv", 40),
        )
    ]


def admitted(family: str, some: list[Policy], **request: Any) -> tuple[Any, list[int], list[LiveSequence]]:
    """The model, the rows of every call of the prefill, and the sequences of all prompts when they have ended."""
    model = prepare(tiny(family))
    batch, rows = DecodeBatch(model), list[int]()
    asked = [Request(script_of(torch.tensor([prompt(n, n)])), 4, **request) for n in LENGTHS]
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = batch.admit(asked, some)
    hook.remove()
    finish(batch)
    return model, rows, [one for sequences in found for one in sequences]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompts_of_any_length_in_shared_calls_equal_each_alone(family: str) -> None:
    model, _, sequences = admitted(family, policies())
    for one in sequences:
        assert_alone(model, one)


def test_a_call_has_a_block_of_every_prompt_that_has_one_left() -> None:
    _, rows, _ = admitted("llama", policies()[:1])
    whole = [sum(n >= (k + 1) * BLOCK for n in LENGTHS) for k in range(max(LENGTHS) // BLOCK)]
    ends = sum(n % BLOCK > 0 for n in LENGTHS)
    assert sorted(rows) == sorted([*whole, *[1] * ends])
    assert max(rows) == len(LENGTHS)


def test_policies_of_whole_prompts_and_of_blocks_enter_together() -> None:
    model, _, sequences = admitted("llama", [*policies()[:2], make_policy("snapkv", 40, window=6)])
    for one in sequences:
        assert_alone(model, one)


def test_a_budget_that_is_too_small_for_one_prompt_ends_only_its_own_sequence() -> None:
    share = make_policy("snapkv", 0.3, schedule="blocks", block=BLOCK, window=20)
    model, _, sequences = admitted("llama", [share])
    errors = [one.error for one in sequences]
    assert [error is None for error in errors] == [round(0.3 * n) >= 20 for n in LENGTHS]
    for one in sequences:
        if one.error is None:
            assert_alone(model, one)


def test_a_run_prefills_its_examples_in_shared_calls_and_writes_what_it_writes_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    fields = ("schedule=blocks", "block=64", "budget=48", "limit=6", "policy.scorer.window=8")
    (shared,) = cells_of(tiny_model, tmp_path / "shared", "snapkv", *fields)
    (alone,) = cells_of(tiny_model, tmp_path / "alone", "snapkv", *fields, rows=1)
    with mock.patch.object(DecodeBatch, "admit", autospec=True, side_effect=DecodeBatch.admit) as admit:
        assert compute_runs([shared]) == [None]
    assert max(len(call.args[1]) for call in admit.call_args_list) > 1
    assert compute_runs([alone]) == [None]
    assert results(shared) == results(alone)

"""Watchers see every evicted token once, whatever evicts it: blocks, prompts, thresholds, budgets, single tokens."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import ended
from kv_watch import Ledger, ledger_of
from torch import Tensor

import kvbench
from kvbench import KVCache, make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.cache.sequence import CachedSequence
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.errors import ConfigError, UsageError
from kvbench.policies.policy import Policy
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config

LENGTH, NEW, BUDGET = 90, 9, 40


def assert_complete(sequence: CachedSequence) -> None:
    """Every token is held or was evicted once, in every KV head."""
    gone = [line[1:] for line in ledger_of(sequence)]
    assert len({*gone}) == len(gone)
    for layer in sequence.layers:
        for head, slots in enumerate(layer.positions[0].tolist()):
            own = [position for index, at, position in gone if (index, at) == (layer.index, head)]
            assert sorted(own + [at for at in slots if at >= 0]) == [*range(sequence.seen)]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole prompts, layers together": ("snapkv", {"decode": "grow"}),
    "single tokens": ("h2o", {"decode": "evict"}),
    "several tokens at once": ("h2o", {"decode": "evict", "every": 3}),
    "blocks": ("caote_snapkv", {"schedule": "blocks", "block": 32}),
    "the first attends last": ("h2o", {"order": "evict_then_attend"}),
    "heads of their own length": ("ada_snapkv", {"decode": "evict"}),
    "budgets that are measured": ("cake", {"decode": "evict"}),
    "after a pre-pass": ("kvzip", {"decode": "evict"}),
    "codes": ("snapkv_fp8", {"decode": "evict"}),
    "merged tokens": ("d2o", {"decode": "evict"}),
    "thresholds": ("threshold_random", {"decode": "threshold", "tau": 0.5, "window": 8}),
}


def policy_of(slug: str, fields: dict[str, Any]) -> Policy:
    return make_policy(slug, None if "tau" in fields else BUDGET, **fields)


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_held_or_was_shown_once(name: str) -> None:
    policy = policy_of(*CASES[name])
    row = ended(prepare(tiny()), [request()], [policy])[0]
    assert row.error is None
    assert row.cache is not None
    assert_complete(row.cache.sequence)
    assert ledger_of(row.cache.sequence), "tokens were evicted"


def request(ids: Tensor | None = None, context: int | None = None) -> Request:
    script = script_of(torch.tensor([prompt(LENGTH)]) if ids is None else ids, context)
    return Request(script, max_new_tokens=NEW, encoder=CodePoints(), watch=(Ledger(),))


def test_single_tokens_are_shown_one_by_one_on_both_backends() -> None:
    """In a batch of two budgets: each decoded token evicts one token per layer and KV head."""
    model, policies, found = prepare(tiny(dtype=torch.float32)), [make_policy("h2o", n) for n in (BUDGET, 55)], []
    for backend in (nullcontext(), patch("kvbench.cache.attend.backend_of", lambda like: TritonBackend())):
        with backend:
            rows = ended(model, [request()], policies)
        found.append([ledger_of(row.cache.sequence) for row in rows if row.cache is not None])
    assert found[0] == found[1]
    for lines in found[0]:
        for seen in range(LENGTH + 1, LENGTH + NEW):
            assert sorted(line[1:3] for line in lines if line[0] == seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_each_question_about_a_context_continues_with_its_own_watcher() -> None:
    model = prepare(tiny())
    ids = torch.tensor([prompt(LENGTH)])
    other = torch.cat([ids[:, :80], ids[:, 60:70]], 1)
    asked = [request(ids, 80), request(other, 80)]
    rows = ended(model, asked, [make_policy("h2o", BUDGET, decode="evict")])
    logs = []
    for row in rows:
        assert row.cache is not None
        assert_complete(row.cache.sequence)
        logs.append(ledger_of(row.cache.sequence))
    of_context = [[line for line in lines if line[0] <= 80] for lines in logs]
    assert of_context[0] == of_context[1] != []


def test_model_generate_shows_the_evictions_of_a_padded_batch() -> None:
    model, caches = prepare(tiny()), []
    for rows in ([0, 1], [1]):
        ids = torch.tensor([[0] * 20 + prompt(70, 1), prompt(90, 2)])[rows]
        mask = torch.tensor([[0] * 20 + [1] * 70, [1] * 90])[rows]
        cache = KVCache(model.config, make_policy("h2o", BUDGET), [int(n) for n in mask.sum(1)])
        for sequence in cache.sequences:
            sequence.watchers = [Ledger()]
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
        for sequence in cache.sequences:
            assert_complete(sequence)
        caches.append(cache)
    assert ledger_of(caches[0].sequences[1]) == ledger_of(caches[1].sequences[0])


def test_a_watcher_that_is_none_is_refused() -> None:
    ledger = {"_target_": "kv_watch.Ledger"}
    refused: tuple[tuple[list[Any], str], ...] = (
        ([{"_target_": "kvbench.policies.scorers.h2o.H2O"}], r"watch\[0\]=.* is not a watcher"),
        (["Ledger"], r"watch\[0\]=Ledger is not a watcher: its _target_ must name a Watcher"),
        ([ledger, ledger], r"watch\[1\]=.* is a second watcher with the name ledger"),
    )
    for watch, words in refused:
        with pytest.raises(ConfigError, match=words):
            build_run(run_config("pocket", "snapkv", "niah", watch=watch))


def test_a_run_without_evictions_to_watch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "' + "one two three " * 99 + '"}')
    task = {"task": "perplexity", "task.data_dir": str(tmp_path / "texts.jsonl"), "task.length": 99}
    with pytest.raises(UsageError, match="watch has no effect: task perplexity is computed as a whole under h2o"):
        kvbench.evaluate(
            "pocket", policies=["h2o"], budgets=[64], tasks=[task.pop("task")], watch=[{"_target_": "kv_watch.Ledger"}],
            out=tmp_path, schedule="blocks", block=16, **task,
        )  # fmt: skip


def test_the_number_is_part_of_the_identity_of_a_run() -> None:
    plain, watched = (
        build_run(run_config("pocket", "snapkv", "niah", watch=watch)).identity
        for watch in ([], [{"_target_": "kv_watch.Ledger"}])
    )
    assert "watch" not in plain
    assert watched["watch"] == [{"class": "kv_watch.Ledger"}]


def test_generate_tokens_takes_watchers() -> None:
    done = generate_tokens(
        prepare(tiny()), torch.tensor([prompt(LENGTH)]), make_policy("h2o", BUDGET), max_new_tokens=2, watch=(Ledger(),)
    )
    assert len(ledger_of(done.cache.sequences[0])) == 4 * (LENGTH + 1 - BUDGET)

"""Decoding that evicts every k tokens, and prompts that stay: against lists by hand and lone runs."""

from itertools import chain
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny
from kv_runs import Run, assert_rows_alone, ended, kept_now, run_greedy
from transformers import DynamicCache

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Prompt

BUDGET, EVERY, NEW = 40, 5, 23
SLUGS = ["h2o", "snapkv", "ada_snapkv", "cake", "d2o"]


def policy(slug: str, budget: int = BUDGET, every: int = EVERY, **fields: Any) -> Policy:
    window = {"window": 6} if slug in ("snapkv", "ada_snapkv", "cake") else {}
    return make_policy(slug, budget, decode="evict", every=every, **window, **fields)


def lengths(run: Run) -> list[float]:
    """Tokens per KV head after every call, the mean over layers and heads."""
    return [sum(map(len, chain(*kept))) / 4 for kept in run.of_row(0)]


def by_hand(length: int, calls: int) -> list[int]:
    """The cache grows to `EVERY` tokens beyond the budget, then is at the budget again."""
    held, found = min(length, BUDGET), []
    for _ in range(calls):
        found.append(held)
        held = BUDGET if held + 1 == BUDGET + EVERY else held + 1
    return found


@pytest.mark.parametrize("slug", SLUGS)
def test_the_cache_grows_by_k_tokens_and_returns_to_the_budget_at_once(slug: str) -> None:
    """A prompt that fits grows to the same size."""
    for ids in (prompt(56), prompt(33, seed=1)):
        assert lengths(run_greedy(tiny(), [ids], policy(slug), NEW)) == by_hand(len(ids), NEW)


@pytest.mark.parametrize("length", [56, 40, 33])
def test_the_audit_promises_exactly_these_lengths(length: int) -> None:
    model = prepare(tiny())
    cache = KVCache(model.config, policy("knorm"), prompt_length=length)
    model(torch.tensor([prompt(length)]), past_key_values=cache)
    budgets = cache.sequence.budgets
    assert [budgets.promise(length + call) for call in range(NEW)] == [[n] * 2 for n in by_hand(length, NEW)]


def test_every_query_counts_in_running_sums_also_where_nothing_is_evicted() -> None:
    """H2O without a recent window: the sums of all queries so far, by hand, decide what goes after four tokens."""
    queries, keys, values = drawn(12)
    made = Crafted(make_policy("h2o", 6, recent=0, every=4), prompt_length=8)
    made.call(*(x[:, :, :8] for x in (queries, keys, values)))

    def row(query: int, held: list[int]) -> dict[int, float]:
        weights = (keys[0, 0, held] @ queries[0, 0, query]).softmax(-1).tolist()
        return dict(zip(held, weights, strict=True))

    sums = {j: sum(row(q, list(range(q + 1))).get(j, 0.0) for q in range(8)) for j in range(8)}
    held = sorted(sorted(sums, key=lambda j: -sums[j])[:6])
    assert made.kept() == [tuple(held)]
    for new in range(8, 12):
        held.append(new)
        sums[new] = 0.0
        for j, weight in row(new, held).items():
            sums[j] += weight
        made.call(*(x[:, :, new : new + 1] for x in (queries, keys, values)))
    assert made.kept() == [tuple(sorted(sorted(held, key=lambda j: -sums[j])[:6]))]


def test_sequences_with_different_turns_are_equal_alone() -> None:
    policies = [policy(slug, budget) for slug in ("h2o", "ada_snapkv", "cam", "d2o") for budget in (24, 40)]
    assert_rows_alone(prepare(tiny("gemma2")), policies, (56, 33), NEW)


@pytest.mark.parametrize("every", [1, EVERY])
def test_all_tokens_of_a_protected_prompt_stay(every: int) -> None:
    model = prepare(tiny())
    policies = [policy(slug, every=every, protect="prompt") for slug in ("knorm", "random", "h2o_norecent")]
    requests = [Request(script_of(torch.tensor([prompt(length)])), max_new_tokens=NEW) for length in (30, 36)]
    for row in ended(model, requests, policies):
        length = row.request.length
        for head in chain(*kept_now(row.cache)[0]):
            assert head[:length] == tuple(range(length))
            assert len(head) == by_hand(length, NEW)[-1] if every > 1 else BUDGET


def test_wrong_schedules_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="they have no effect with decode=grow"):
        Prompt(decode="grow", every=8)
    with pytest.raises(ValueError, match="they have no effect with decode=grow"):
        make_policy("snapkv", 64, protect="prompt")  # whose own rule is to grow
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        Prompt(every=0)
    with pytest.raises(ValueError, match="protect must be none, prompt or span, got 'all'"):
        Prompt(protect="all")
    full = torch.tensor([prompt(BUDGET)])
    with pytest.raises(ValueError, match="protect=prompt keeps all 40 tokens of the prompt and at least one generated"):
        generate_tokens(prepare(tiny()), full, policy("knorm", protect="prompt", every=1), max_new_tokens=2)


def test_a_share_of_all_tokens_is_kept_while_decoding_as_by_kvpress() -> None:
    """kvpress's ratio for decoding, applied after every token, removes half of all tokens seen so far."""
    kvpress = pytest.importorskip("kvpress")
    ids, new = torch.tensor([prompt(56)]), 23
    model = prepare(tiny())
    ours = make_policy("knorm", 0.5, decode="share", schedule="prompt")
    got = generate_tokens(model, ids, ours, max_new_tokens=new)
    assert got.cache.kept_tokens().unique().tolist() == [(56 + new - 1) // 2]
    theirs, cache = tiny(), DynamicCache()
    theirs.set_attn_implementation("sdpa")
    decoder = kvpress.CompressionRatioDecodingPress(
        kvpress.KnormPress(), target_compression_ratio=0.5, compression_interval=1, hidden_states_buffer_size=0
    )
    press, tokens = kvpress.PrefillDecodingPress(kvpress.KnormPress(0.5), decoder), [ids]
    with torch.inference_mode(), press(theirs):
        for place in range(55, 55 + new):
            where = torch.arange(0 if len(tokens) == 1 else place, place + 1)
            out = theirs(tokens[-1], past_key_values=cache, position_ids=where[None], cache_position=where)
            tokens.append(out.logits[:, -1:].argmax(-1))
    assert got.tokens[0] == torch.cat(tokens[1:], 1)[0].tolist()


@pytest.mark.parametrize("slug", ["h2o", "snapkv", "ada_snapkv"])
def test_the_budget_of_a_share_grows_with_the_answer(slug: str) -> None:
    own = make_policy(slug, 0.5, decode="share", **({} if slug == "h2o" else {"window": 6}))
    run = run_greedy(tiny(), [prompt(56)], own, NEW)
    assert lengths(run) == [(56 + call) // 2 for call in range(NEW)]


@pytest.mark.parametrize("slug", ["cake", "snapkv_fp8"])
def test_the_budgets_of_layers_grow_in_proportion(slug: str) -> None:
    """CAKE's layers have different budgets, each rounded down; a quantized store evicts its codes."""
    model, ids = prepare(tiny()), torch.tensor([prompt(56)])
    own = make_policy(slug, 0.5, decode="share", window=6)
    before, after = (generate_tokens(model, ids, own, max_new_tokens=new).cache.kept_tokens() for new in (1, 23))
    assert before.sum(0).unique().tolist() == [56]  # of two layers
    assert torch.equal(after, before * 78 // 56)


def test_a_share_needs_a_budget_that_is_one() -> None:
    with pytest.raises(ValueError, match=r"decode=share needs a share as budget, such as budget=0.5, got budget=64"):
        make_policy("knorm", 64, decode="share")
    with pytest.raises(ValueError, match="need decode=evict"):
        make_policy("knorm", 0.5, decode="share", every=4)

"""Decoding that evicts every k tokens, and prompts that stay: against lists by hand, lone runs, and kvpress."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny
from kv_oracle import Kept
from kv_runs import Run, kept_now, run_greedy
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.join import join, together
from kvbench.config.presets import policy_config, scheduled
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request
from kvbench.identity.labels import in_words, moments
from kvbench.inference.cuda_graph import can_record
from kvbench.inference.teacher_forcing import continuation_scores
from kvbench.models.cache_shapes import CacheShape
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Prompt
from kvbench.tools.cache_bytes import predict
from kvbench.tools.diagnose import cells_of

BUDGET, EVERY, NEW = 40, 5, 23
SLUGS = ["knorm", "h2o", "snapkv", "tova", "ada_snapkv", "cake", "cam", "d2o", "random"]


def policy(slug: str, budget: int = BUDGET, every: int = EVERY, **fields: Any) -> Policy:
    window = {"window": 6} if slug in ("snapkv", "ada_snapkv", "cake") else {}
    return make_policy(slug, budget, decode="evict", every=every, **window, **fields)


def lengths(run: Run, row: int = 0) -> list[float]:
    """Tokens per KV head after every call, the mean over layers and heads."""
    return [sum(map(len, chain(*kept))) / 4 for kept in run.of_row(row)]


def by_hand(length: int, calls: int) -> list[int]:
    """The cache grows to `EVERY` tokens beyond the budget, then is at the budget again."""
    held, found = min(length, BUDGET), []
    for _ in range(calls):
        found.append(held)
        held = BUDGET if held + 1 == BUDGET + EVERY else held + 1
    return found


@pytest.mark.parametrize("slug", SLUGS)
def test_the_cache_grows_by_k_tokens_and_returns_to_the_budget_at_once(slug: str) -> None:
    """A prompt that fits grows to the same size; rows of a batch, whose turns differ, keep what they keep alone."""
    model, prompts = tiny(), [prompt(56), prompt(33, seed=1)]
    batch = run_greedy(model, prompts, policy(slug), NEW)
    for row, ids in enumerate(prompts):
        alone = run_greedy(model, [ids], policy(slug), NEW)
        assert lengths(alone) == by_hand(len(ids), NEW)
        assert batch.of_row(row)[-NEW:] == alone.of_row(0)[-NEW:]
        assert batch.tokens[row] == alone.tokens[0]


def test_what_goes_are_the_k_lowest_scores_of_all_that_is_held() -> None:
    _, keys, values = drawn(30, 2, 2)
    norms = keys[0].norm(dim=-1).tolist()
    made = Crafted(make_policy("knorm", 10, every=4), 2, 2)
    made.call(keys[:, :, :14], keys[:, :, :14], values[:, :, :14])
    expected = [sorted(sorted(range(14), key=lambda j, n=n: n[j])[:10]) for n in norms]  # small norms stay
    for new in range(14, 30):
        made.call(*(x[:, :, new : new + 1] for x in (keys, keys, values)))
        for head, n in enumerate(norms):
            expected[head].append(new)
            if len(expected[head]) == 14:
                expected[head] = sorted(sorted(expected[head], key=lambda j, n=n: n[j])[:10])
        assert made.kept() == [tuple(head) for head in expected]


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


def test_one_token_each_is_what_every_1_says() -> None:
    model, ids = tiny(), [prompt(56)]
    for slug in ("h2o", "ada_snapkv"):
        said, usual = (run_greedy(model, ids, policy(slug, every=1, **more), NEW) for more in ({}, {"protect": "none"}))
        assert said.kept == usual.kept
        assert lengths(said) == [BUDGET] * NEW


def test_sequences_in_flight_whose_turns_differ_give_what_they_give_alone() -> None:
    model = prepare(tiny("gemma2"))
    rows = DecodeBatch(model)
    policies = [policy(slug, budget) for slug in ("h2o", "ada_snapkv", "streamingllm") for budget in (24, 40)]
    found = rows.admit(Request(torch.tensor([prompt(56)]), max_new_tokens=NEW), policies)
    rows.step()
    found += rows.admit(Request(torch.tensor([prompt(33, seed=1)]), max_new_tokens=NEW), policies)
    while rows.in_flight:
        rows.step()
    for row in found:
        assert row.error is None
        assert row.cache is not None
        alone = generate_tokens(model, row.request.input_ids, row.policy, max_new_tokens=NEW)
        assert row.tokens == alone.tokens[0]
        assert kept_now(row.cache) == kept_now(alone.cache)
        assert (row.cache.nbytes, row.cache.peak_nbytes) == (alone.cache.nbytes, alone.cache.peak_nbytes)


def test_they_are_no_rows_of_one_store_and_no_steps_to_record() -> None:
    model, caches = prepare(tiny()), []
    for seed in (0, 1):
        caches.append(KVCache(model.config, policy("h2o")))
        model(torch.tensor([prompt(56, seed)]), past_key_values=caches[-1])
    cache = together(caches)
    join(cache)
    assert len(cache.groups) == 2
    assert cache.on_device() is None
    assert not can_record(policy("h2o"))
    assert can_record(policy("h2o", every=1, protect="prompt"))


@pytest.mark.parametrize("slug", ["snapkv", "h2o", "ada_snapkv"])
def test_a_cache_saved_between_two_evictions_goes_on_as_it_would(slug: str, tmp_path: Path) -> None:
    model, ids = prepare(tiny()), torch.tensor([prompt(56 + NEW)])
    file = tmp_path / "cache.safetensors"
    cache = KVCache(model.config, policy(slug))
    with torch.inference_mode():
        model(ids[:, :56], past_key_values=cache)
        for step in range(56, 56 + NEW):
            if step in (59, 68):
                cache.save(file)
                loaded = KVCache.load(file, model.config, policy(slug))
            logits = model(ids[:, step : step + 1], past_key_values=cache).logits
            if step >= 59:
                assert torch.equal(model(ids[:, step : step + 1], past_key_values=loaded).logits, logits)
    assert kept_now(loaded) == kept_now(cache)
    loaded.audit()


def test_a_question_after_its_context_and_tokens_that_are_given_are_decoded_tokens() -> None:
    model, chosen = prepare(tiny()), policy("h2o")
    ids = torch.tensor([prompt(56 + 12)])
    asked = generate_tokens(model, ids, chosen, max_new_tokens=1, context_tokens=56)
    cache = KVCache(model.config, chosen, prompt_length=56)
    with torch.inference_mode():
        for part in ids.split([56, *[1] * 12], dim=1):
            logits = model(part, past_key_values=cache).logits[:, -1]
    assert kept_now(asked.cache) == kept_now(cache)
    assert asked.cache.kept_tokens().unique().tolist() == [BUDGET + 12 % EVERY]
    assert asked.tokens == [[int(logits.argmax())]]
    scores = [continuation_scores(model, ids[:, :56], ids[:, 56:], chosen, block=block) for block in (1, None)]
    torch.testing.assert_close(scores[0].logprobs, scores[1].logprobs)
    assert int(scores[0].most_kept.max()) == BUDGET + EVERY


def test_slots_for_the_k_tokens_are_counted_and_foretold() -> None:
    model, chosen = prepare(tiny(dtype=torch.float32)), policy("snapkv", every=7)
    cache = KVCache(model.config, chosen)
    with torch.inference_mode():
        model(torch.tensor([prompt(117)]), past_key_values=cache)
    assert predict(chosen, CacheShape(2, 4, 2, 8, torch.float32), 117).nbytes == cache.held_nbytes
    assert [layer.store.capacity for layer in cache.group.layers] == [BUDGET + 7] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("every", [1, EVERY])
def test_all_tokens_of_a_protected_prompt_stay(every: int) -> None:
    model = prepare(tiny())
    policies = [policy(slug, every=every, protect="prompt") for slug in ("knorm", "random", "h2o_norecent")]
    rows = DecodeBatch(model)
    found = [
        row
        for seed, length in enumerate((30, 36))
        for row in rows.admit(Request(torch.tensor([prompt(length, seed)]), max_new_tokens=NEW), policies)
    ]
    while rows.in_flight:
        rows.step()
    for row in found:
        assert row.error is None
        assert row.cache is not None
        length = row.request.input_ids.shape[1]
        alone = generate_tokens(model, row.request.input_ids, row.policy, max_new_tokens=NEW)
        assert kept_now(row.cache) == kept_now(alone.cache)
        for head in chain(*kept_now(row.cache)[0]):
            assert head[:length] == tuple(range(length))
            assert len(head) == by_hand(length, NEW)[-1] if every > 1 else BUDGET


def test_a_prompt_that_does_not_fit_beside_the_newest_tokens_is_refused() -> None:
    model = prepare(tiny())
    generate_tokens(model, torch.tensor([prompt(BUDGET - 6)]), policy("snapkv", protect="prompt"), max_new_tokens=8)
    with pytest.raises(ValueError, match="protect=prompt keeps all 35 tokens of the prompt beside the newest 6 tokens"):
        generate_tokens(model, torch.tensor([prompt(BUDGET - 5)]), policy("snapkv", protect="prompt"), max_new_tokens=8)


def test_wrong_schedules_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="with decode=grow they have no meaning"):
        Prompt(decode="grow", every=8)
    with pytest.raises(ValueError, match="with decode=grow they have no meaning"):
        make_policy("snapkv", 64, protect="prompt")  # whose own rule is to grow
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        Prompt(every=0)
    with pytest.raises(ValueError, match="protect must be none or prompt, got 'all'"):
        Prompt(protect="all")  # type: ignore[arg-type]


def test_the_command_line_sets_it_and_growing_drops_it(tiny_model: Path, tmp_path: Path) -> None:
    words = [f"model={tiny_model}", "policy=snapkv", "decode=evict", "every=16", "protect=prompt", f"out={tmp_path}"]
    schedule = cells_of(words)[0].policy.schedule
    assert (schedule.every, schedule.protect, str(schedule)) == (16, "prompt", "prompt")
    often = scheduled(policy_config("h2o"), every=16)
    assert scheduled(often, schedule="blocks", block=8)["schedule"]["every"] == 16
    assert "every" not in scheduled(often, decode="grow")["schedule"]


def test_tables_say_how_often() -> None:
    identity = {"policy": describe(policy("h2o", every=128)), "budget": BUDGET}
    assert moments(identity) == ("prompt", "evict every 128")
    assert in_words("evict every 128") == "128 tokens evicted once 128 are held beyond the budget"


@torch.inference_mode()
def pressed(model: PreTrainedModel, ids: Tensor, press: Any) -> list[Kept]:
    """Positions that kvpress holds after each decoded token, told by the keys that go in and come out."""
    press_of, layers = pytest.importorskip("kvpress", reason="kvpress is not installed"), [[], []]  # type: ignore[var-annotated]
    compress = press_of.DecodingPress.compress

    def noting(self: Any, module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> Any:
        out = compress(self, module, hidden, keys, *rest)
        same = (out[0][0, :, :, None] == keys[0, :, None]).all(-1).to(torch.uint8).argmax(-1)
        before = layers[module.layer_idx]
        layers[module.layer_idx] = [[head[i] for i in own] for head, own in zip(before, same.tolist(), strict=True)]
        return out

    model.set_attn_implementation("sdpa")
    found, cache = [], DynamicCache()
    decoding = press_of.DecodingPress(press, compression_interval=EVERY, target_size=BUDGET)
    with patch.object(press_of.DecodingPress, "compress", noting), decoding(model):
        for start, end in [(0, BUDGET), *((p, p + 1) for p in range(BUDGET, ids.shape[1]))]:
            new = list(range(start, end))
            layers[:] = [[head + new for head in layer or [[], []]] for layer in layers]
            here = torch.tensor(new)
            model(ids[:, start:end], past_key_values=cache, position_ids=here[None], cache_position=here)
            found.append([[tuple(sorted(head)) for head in layer] for layer in layers])
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_sets_are_those_of_kvpress_decoding_press(family: str) -> None:
    """By key norms: other presses take a token's slot, which top-k moves, for its place, or rotate old queries anew.

    No two norms of this prompt are so near that we call them equal.
    """
    presses = pytest.importorskip("kvpress", reason="kvpress is not installed: DecodingPress cannot be asked")
    model, ids = tiny(family, dtype=torch.float32), torch.tensor([prompt(BUDGET + NEW, seed=3)])
    theirs = pressed(model, ids, presses.KnormPress())
    cache = KVCache(prepare(model).config, policy("knorm"), prompt_length=BUDGET)
    for part, expected in zip(ids.split([BUDGET, *[1] * NEW], dim=1), theirs, strict=True):
        model(part, past_key_values=cache)
        assert kept_now(cache)[0] == expected

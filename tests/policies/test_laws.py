"""Laws that hold for every preset: a new file in conf/policy/ is tested here by being there."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny
from kv_oracle import Kept
from kv_presets import evicting, kinds
from kv_runs import QUESTION, Run, kept_now, run_greedy
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.ragged import Ragged

LAYERS, QUERY_HEADS, KV_HEADS = 2, 4, 2
LENGTH, BUDGET, NEW = 56, 40, 4
IDS = prompt(LENGTH)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Policy]:
    """A preset by name; HeadKV gets the importance file it asks for."""
    file = tmp_path_factory.mktemp("headkv") / "importance.json"
    file.write_text(json.dumps({f"{i}-{h}": [1.0 + i + h] for i in range(LAYERS) for h in range(QUERY_HEADS)}))

    def build(slug: str, budget: int = BUDGET) -> Policy:
        extra: dict[str, Any] = {"importance": str(file)} if slug.startswith("headkv") else {}
        return make_policy(slug, budget, **extra)

    return build


@cache
def model() -> PreTrainedModel:
    return tiny(kv_heads=KV_HEADS)


def tokens_held(kept: Kept) -> int:
    return sum(len(head) for layer in kept for head in layer)


def assert_sound(run: Run, policy: Policy, length: int) -> None:
    """After every call: no token twice, none unseen, and in all exactly what was promised."""
    slots = LAYERS * KV_HEADS
    schedule, each = policy.schedule, min(BUDGET, length)
    for call, kept in enumerate(run.of_row(0)):
        seen = length + call
        assert all(len(set(head)) == len(head) and set(head) <= set(range(seen)) for layer in kept for head in layer)
        held = tokens_held(kept)
        assert held == each * slots if policy.allocator.exact else held <= (each + 1) * slots
        each += 1
        if schedule.decode == "evict" and each == BUDGET + schedule.every:
            each = BUDGET


@pytest.mark.parametrize("slug", evicting())
def test_the_budget_holds_to_the_token_after_every_call(built: Callable[..., Policy], slug: str) -> None:
    policy = built(slug)
    assert_sound(run_greedy(model(), [IDS], policy, NEW), policy, LENGTH)


@pytest.mark.parametrize("length", [1, BUDGET - 1, BUDGET, BUDGET + 1])
@pytest.mark.parametrize("slug", kinds())
def test_the_budget_holds_around_a_prompt_as_long_as_it(built: Callable[..., Policy], slug: str, length: int) -> None:
    policy = built(slug)
    assert_sound(run_greedy(model(), [prompt(length)], policy, NEW), policy, length)


@pytest.mark.parametrize("slug", kinds())
def test_a_budget_nobody_exceeds_is_the_full_cache(built: Callable[..., Policy], slug: str) -> None:
    policy = built(slug, LENGTH + NEW)
    assert isinstance(policy.store, Dense | Ragged)
    run, full = (run_greedy(model(), [IDS], p, NEW) for p in (policy, make_policy("full")))
    assert run.tokens == full.tokens
    assert run.kept == full.kept


@pytest.mark.parametrize("slug", kinds())
def test_rows_of_a_padded_batch_keep_what_they_keep_alone(built: Callable[..., Policy], slug: str) -> None:
    policy, short = built(slug), prompt(LENGTH - 9, seed=1)
    batch = run_greedy(model(), [IDS, short], policy, NEW)
    for row, ids in enumerate((IDS, short)):
        alone = run_greedy(model(), [ids], policy, NEW)
        assert batch.of_row(row)[-NEW:] == alone.of_row(0)[-NEW:]
        assert batch.tokens[row] == alone.tokens[0]


@pytest.mark.slow("runs every preset")
@pytest.mark.parametrize("slug", [slug for slug in evicting() if slug not in kinds()])
def test_rows_of_a_padded_batch_keep_what_they_keep_alone_whatever_the_numbers(
    built: Callable[..., Policy], slug: str
) -> None:
    test_rows_of_a_padded_batch_keep_what_they_keep_alone(built, slug)


def in_calls(policy: Policy, sizes: Sequence[int]) -> tuple[list[Kept], Tensor]:
    """A prompt in calls of these sizes and then NEW tokens: what is held after each of them, and all logits."""
    running = model()
    running.set_attn_implementation("kvbench")
    held = KVCache(running.config, policy, prompt_length=LENGTH, question=LENGTH - QUESTION)
    ids, kept = torch.tensor([[*IDS, *prompt(NEW, seed=1)]]), []
    out = []
    with torch.inference_mode():
        for part in ids.split([*sizes, *[1] * NEW], dim=1):
            out.append(running(part, past_key_values=held).logits)
            kept.append(kept_now(held)[0])
    return kept[-NEW - 1 :], torch.cat(out, dim=1)


def at_random(slug: str) -> list[int]:
    """Five calls, cut where nobody chose."""
    ends = sorted(random.Random(slug).sample(range(1, LENGTH), 4))
    return [end - start for start, end in pairwise([0, *ends, LENGTH])]


@pytest.mark.parametrize("decode", ["evict", "grow"])
@pytest.mark.parametrize("slug", [slug for slug in kinds() if make_policy(slug, BUDGET).pre_pass is None])
def test_how_a_prompt_is_cut_into_calls_changes_nothing(built: Callable[..., Policy], slug: str, decode: str) -> None:
    policy = built(slug)
    policy = replace(policy, schedule=replace(policy.schedule, decode=decode, every=1))
    kept, logits = in_calls(policy, [LENGTH])
    one_by_one = [[1] * LENGTH] if slug in ("kvec", "snapkv") else []
    for sizes in ([LENGTH - 1, 1], at_random(slug), *one_by_one):
        again, close = in_calls(policy, sizes)
        assert again == kept, sizes
        torch.testing.assert_close(close, logits, rtol=1e-9, atol=1e-9)


@pytest.mark.slow("runs every preset")
@pytest.mark.parametrize("slug", [slug for slug in evicting() if slug not in kinds()])
def test_how_a_prompt_is_cut_into_calls_changes_nothing_whatever_the_numbers(
    built: Callable[..., Policy], slug: str
) -> None:
    test_how_a_prompt_is_cut_into_calls_changes_nothing(built, slug, built(slug).schedule.decode)


@pytest.mark.parametrize(
    ("slug", "fields", "first", "newest"),
    [
        ("streamingllm", {}, 4, 12 - 4),
        ("streamingllm", {"sinks": 2}, 2, 12 - 2),
        ("local_window", {}, 0, 12),
        ("h2o", {}, 0, 6),
        ("h2o", {"recent": 3}, 0, 3),
        ("snapkv", {"window": 5, "decode": "evict"}, 0, 5),
        ("caote_snapkv", {"window": 5, "block": 8}, 0, 5),
        ("fastcaote_snapkv", {"window": 5, "block": 8, "norm_domain": "candidates"}, 0, 5),
    ],
)
def test_protected_tokens_always_stay(slug: str, fields: dict[str, Any], first: int, newest: int) -> None:
    run = run_greedy(model(), [IDS], make_policy(slug, 12, **fields), NEW)
    decodes = NEW - 1
    for call, kept in enumerate(run.of_row(0)):
        seen = int(max(max(head) for layer in kept for head in layer)) + 1 if newest else 0
        assert seen in (LENGTH, *range(8, LENGTH, 8), *range(LENGTH, LENGTH + decodes + 1)), call
        safe = set(range(first)) | set(range(seen - newest, seen))
        assert all(safe <= set(head) for layer in kept for head in layer)


@pytest.mark.parametrize("slug", ["knorm", "h2o", "tova", "snapkv", "caote_h2o", "fastcaote_tova", "kvec", "roco"])
def test_swapped_heads_keep_swapped_tokens(slug: str) -> None:
    policy = make_policy(slug, BUDGET, schedule="prompt")
    queries, keys, values = drawn(LENGTH, QUERY_HEADS, KV_HEADS)
    straight, swapped = (Crafted(policy, QUERY_HEADS, KV_HEADS) for _ in range(2))
    straight.call(queries, keys, values)
    swapped.call(queries.roll(2, dims=1), keys.flip(1), values.flip(1))
    assert swapped.kept() == straight.kept()[::-1]

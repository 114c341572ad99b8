"""Laws of every policy: a new file in conf/policy/ is tested here by being there.

After every call the budget holds to the token, positions are valid and all bytes are counted; a budget that nobody
exceeds gives the full cache; a prompt in several calls keeps what it keeps otherwise.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny
from kv_oracle import Kept
from kv_presets import COMPOSED, PRESETS, evicting, kinds
from kv_runs import QUESTION, bytes_held, kept_now, noting, run_greedy
from parameters import few_fast
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.ragged import Ragged

LAYERS, QUERY_HEADS, KV_HEADS = 2, 4, 2
LENGTH, BUDGET, NEW = 56, 40, 4
IDS = prompt(LENGTH)
EVERY_KIND = [*kinds(), *COMPOSED]
EVERY_PRESET = pytest.mark.slow("runs every preset")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Policy]:
    """A policy by name; HeadKV gets the importance file it asks for."""
    file = tmp_path_factory.mktemp("headkv") / "importance.json"
    file.write_text(json.dumps({f"{i}-{h}": [1.0 + i + h] for i in range(LAYERS) for h in range(QUERY_HEADS)}))

    def build(slug: str, budget: int = BUDGET) -> Policy:
        extra: dict[str, Any] = {"importance": str(file)} if slug.startswith("headkv") else {}
        return make_policy(slug, budget, **COMPOSED.get(slug, {}), **extra)

    return build


@cache
def model(kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny(kv_heads=kv_heads, dtype=dtype)


def tokens_held(kept: Kept) -> int:
    return sum(len(head) for layer in kept for head in layer)


def assert_sound(policy: Policy, length: int, kv_heads: int = KV_HEADS) -> None:
    """After every call: no token twice, none unseen, exactly what was promised, and every byte counted."""

    def note(held: KVCache) -> None:
        beside = bytes_held(held.layers) - held.nbytes  # the ragged store counts no numbers of free slots
        slots = [layer.states[0].store.positions.shape[2] * kv_heads for layer in held.attention_layers]
        longer = 24 * sum(max(slots) - own for own in slots)  # positions and statistics of all layers have equal length
        assert length == 1 or 0 <= beside <= 16 * LAYERS * kv_heads + longer
        assert held.nbytes <= held.peak_nbytes

    with noting(model(kv_heads), note):
        run = run_greedy(model(kv_heads), [prompt(length)], policy, NEW)
    slots = LAYERS * kv_heads
    schedule, each = policy.schedule, min(BUDGET, length)
    for call, kept in enumerate(run.of_row(0)):
        seen = length + call
        assert all(len(set(head)) == len(head) and set(head) <= set(range(seen)) for layer in kept for head in layer)
        held = tokens_held(kept)
        assert held == each * slots if policy.allocator.exact else held <= (each + 1) * slots
        each += 1
        if schedule.decode == "evict" and each == BUDGET + schedule.every:
            each = BUDGET


@pytest.mark.parametrize("slug", few_fast([*evicting(), *COMPOSED], EVERY_KIND, EVERY_PRESET))
def test_the_budget_holds_and_bytes_are_counted_after_every_call(built: Callable[..., Policy], slug: str) -> None:
    assert_sound(built(slug), LENGTH)


@pytest.mark.parametrize(
    ("slug", "size"), [*zip(EVERY_KIND, cycle([(1, KV_HEADS), (BUDGET, QUERY_HEADS), (BUDGET + 1, 1)]))], ids=str
)
def test_the_budget_holds_around_a_prompt_as_long_as_it_for_every_group_size(
    built: Callable[..., Policy], slug: str, size: tuple[int, int]
) -> None:
    """In turn: of one token, as long as the budget, one token longer; for one to four KV heads."""
    assert_sound(built(slug), *size)


TOLERANCE = {torch.float64: 1e-9, torch.bfloat16: 0.1}
"""Largest difference of logits, in their standard deviation; a missing token moves them by about 1.

In 16 bits, policies that sum up rows of attention round the rows; PyTorch's own kernel does not.
"""


@pytest.mark.parametrize("slug", EVERY_KIND)
def test_a_budget_that_is_not_exceeded_gives_the_full_cache_in_64_and_16_bits(
    built: Callable[..., Policy], slug: str
) -> None:
    policy = built(slug, LENGTH + NEW)
    assert isinstance(policy.store, Dense | Ragged)
    if policy.pre_pass is not None:  # only kvbench's own loop makes it
        run, whole = (run_greedy(model(), [IDS], one, NEW) for one in (policy, make_policy("full")))
        assert (run.tokens, run.kept) == (whole.tokens, whole.kept)
        return
    for dtype, tolerance in TOLERANCE.items():
        (kept, logits), (held, expected) = in_calls(policy, [LENGTH], dtype), full_cache(dtype)
        assert kept == held
        assert float((logits - expected)[:, -NEW - 1 :].abs().max() / expected.std()) <= tolerance, dtype


def in_calls(policy: Policy, sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[list[Kept], Tensor]:
    """A prompt in calls of these sizes and then NEW tokens: what is held after each of them, and all logits."""
    running = model(dtype=dtype)
    running.set_attn_implementation("kvbench")
    held = KVCache(running.config, policy, prompt_length=LENGTH, question=LENGTH - QUESTION)
    ids, kept = torch.tensor([[*IDS, *prompt(NEW, seed=1)]]), []
    out = []
    with torch.inference_mode():
        for part in ids.split([*sizes, *[1] * NEW], dim=1):
            out.append(running(part, past_key_values=held).logits)
            kept.append(kept_now(held)[0])
    return kept[-NEW - 1 :], torch.cat(out, dim=1)


@cache
def full_cache(dtype: torch.dtype) -> tuple[list[Kept], Tensor]:
    return in_calls(make_policy("full"), [LENGTH], dtype)


def at_random(slug: str) -> list[int]:
    """Five calls, cut at random places, the last of a single token."""
    ends = sorted(random.Random(slug).sample(range(1, LENGTH - 1), 3))
    return [end - start for start, end in pairwise([0, *ends, LENGTH - 1, LENGTH])]


@pytest.mark.parametrize("decode", few_fast(("evict", "grow"), ("evict",), pytest.mark.slow("runs every kind twice")))
@pytest.mark.parametrize("slug", [slug for slug in kinds() if make_policy(slug, BUDGET).pre_pass is None])
def test_splitting_a_prompt_into_calls_changes_nothing(built: Callable[..., Policy], slug: str, decode: str) -> None:
    policy = built(slug)
    policy = replace(policy, schedule=replace(policy.schedule, decode=decode, every=1))
    kept, logits = in_calls(policy, [LENGTH])
    one_by_one = [[1] * LENGTH] if slug in ("kvec", "snapkv") else []
    for sizes in (at_random(slug), *one_by_one):
        again, close = in_calls(policy, sizes)
        assert again == kept, sizes
        torch.testing.assert_close(close, logits, rtol=1e-9, atol=1e-9)


@pytest.mark.slow("runs every preset")
@pytest.mark.parametrize("slug", [one for one in evicting() if one not in kinds() and not PRESETS[one].get("pre_pass")])
def test_splitting_a_prompt_changes_nothing_in_every_preset(built: Callable[..., Policy], slug: str) -> None:
    test_splitting_a_prompt_into_calls_changes_nothing(built, slug, built(slug).schedule.decode)


@pytest.mark.parametrize(
    ("slug", "fields", "first", "newest"),
    [
        ("streamingllm", {}, 4, 12 - 4),
        ("streamingllm", {"sinks": 2}, 2, 12 - 2),
        ("local_window", {}, 0, 12),
        ("cam", {}, 6, 6),
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

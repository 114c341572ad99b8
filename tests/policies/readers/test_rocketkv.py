"""RocketKV: its sizes by hand, and what is kept and read against plain loops, on models and for batches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import bytes_held, run_greedy
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.copies import fork
from kvbench.cache.hook import prepare
from kvbench.cache.reading import PageReads
from kvbench.cache.views import nbytes_read, tokens_read
from kvbench.engine.generate import generate_tokens
from kvbench.engine.teacher_forcing import score_pair
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy
from kvbench.policies.readers.rocketkv import RocketKV
from kvbench.results.labels import evicts

FAMILIES = ("llama", "qwen3")
WINDOW, KERNEL, MAX_NEW, DIM = 4, 7, 10, 8


def rocket(budget: float, **fields: Any) -> Policy:
    return make_policy("rocketkv", budget, window=WINDOW, kernel=KERNEL, max_new=MAX_NEW, **fields)


class Sizes(NamedTuple):
    """What a budget comes to: prompt tokens kept, tokens per page, channels read, tokens attended to."""

    kept: int
    page: int
    channels: int
    attended: int


def sizes(budget: int, length: int, max_new: int = MAX_NEW, dim: int = DIM, official: bool = False) -> Sizes:
    total = length + max_new
    c = max(1, total / budget)
    capacity = max(int(total / c ** min(0.2 + 0.06 * math.log2(c), 0.8)), min(2 * max_new, total))
    c2 = max(1, capacity / budget)
    page = math.ceil(math.sqrt(c2))
    page = 1 if page > c2 else page
    channels = dim * page / c2
    return Sizes(min(length, capacity - max_new), page, round(channels) if official else int(channels), budget // 2)


@pytest.mark.parametrize(
    ("budget", "length", "official", "expected"),
    [
        (512, 32768 - 128, False, Sizes(3063, 3, 61, 256)),  # c = 64, alpha = 0.56, capacity 3191
        (512, 32768 - 128, True, Sizes(3063, 3, 62, 256)),
        (32768, 32768 - 128, False, Sizes(32640, 1, 128, 16384)),  # c = 1: nothing is evicted, all is read
        (64, 192 - 128, False, Sizes(64, 2, 85, 32)),  # the capacity is all of prompt and answer, c_2 = 3
    ],
)
def test_sizes_worked_by_hand(budget: int, length: int, official: bool, expected: Sizes) -> None:
    reader = RocketKV(128, official)
    plan = reader.plan(budget, length)
    assert Sizes(min(plan.kept, length), plan.page, reader.channels(budget, length, 128), plan.tokens) == expected
    assert sizes(budget, length, 128, 128, official) == expected


# --- against plain loops -------------------------------------------------------------------------------------------
def read_by_hand(queries: list[list[float]], keys: list[list[float]], own: Sizes) -> list[int]:
    """The tokens that the query heads of one KV head attend to, of the kept keys in order of position."""
    if len(keys) <= own.attended:
        return list(range(len(keys)))
    means = [sum(abs(query[d]) for query in queries) / len(queries) for d in range(DIM)]
    channels = sorted(range(DIM), key=lambda d: -means[d])[: own.channels]
    pages = [keys[first : first + own.page] for first in range(0, len(keys), own.page)]
    mean = [0.0] * len(keys)
    for query in queries:
        logits = []
        for page in pages:
            bound = 0.0
            for d in channels:
                ends = [key[d] for key in page]
                bound += query[d] * (max(ends) if sum(q[d] for q in queries) > 0 else min(ends))
            logits += [bound] * len(page)
        share = sum(abs(query[d]) for d in channels) / sum(map(abs, query))
        powers = [math.exp((x - max(logits)) / math.sqrt(DIM * share)) for x in logits]
        mean = [m + x / sum(powers) / len(queries) for m, x in zip(mean, powers, strict=True)]
    return sorted(sorted(range(len(keys)), key=lambda j: (-mean[j], j))[: own.attended])


class Read(NamedTuple):
    """One decoded query in one layer: queries [H_q,D], what is held, and the output of the attention [H_q,D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    out: Tensor | None


@contextmanager
def reads() -> Iterator[list[Read]]:
    """Every decoded query of the first sequence, in order; nothing is changed."""
    found: list[Read] = []
    attend = PageReads.attend

    def noting(self: PageReads, queries: Tensor, at: Tensor, store: Any, *how: Any) -> Tensor | None:
        out = attend(self, queries, at, store, *how)
        held = (x[0].clone() for x in (queries[:, :, 0], store.keys, store.values, store.positions))
        found.append(Read(*held, None if out is None else out[0, :, 0].clone()))
        return out

    with patch.object(PageReads, "attend", noting):
        yield found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "length", "official"), [(12, 60, False), (12, 60, True), (20, 45, False)])
def test_a_decoded_query_attends_to_the_tokens_of_its_largest_approximate_attention(
    family: str, budget: int, length: int, official: bool
) -> None:
    model, ids, own = prepare(tiny(family)), prompt(length), sizes(budget, length, official=official)
    assert own.page > 1
    assert own.channels < DIM
    with reads() as found:
        run = run_greedy(model, [ids], rocket(budget, official=official), MAX_NEW)
    assert len(found) == 2 * (MAX_NEW - 1)
    cut = 0
    for read in found:
        scaling = DIM**-0.5
        for head in range(2):
            count = int((read.positions[head] >= 0).sum())
            assert read.positions[head, :count].tolist() == sorted(read.positions[head, :count].tolist())
            keys, values = read.keys[head, :count], read.values[head, :count]
            group = read.queries[2 * head : 2 * head + 2]
            chosen = read_by_hand(group.tolist(), keys.tolist(), own)
            cut += any(j % own.page == 0 and j + 1 < count and j + 1 not in chosen for j in chosen)
            expected = (group @ keys[chosen].T * scaling).softmax(-1) @ values[chosen]
            torch.testing.assert_close(read.out[2 * head : 2 * head + 2], expected)
    assert cut > 0, "no page was cut"
    counts = tokens_read(run.cache.sequence)
    assert counts == [[own.attended] * 2] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_of_the_prompt_snapkv_s_tokens_are_kept_and_generated_tokens_all(family: str) -> None:
    model, own = prepare(tiny(family)), sizes(12, 60)
    got = run_greedy(model, [prompt(60)], rocket(12), MAX_NEW).of_row(0)
    snapkv = make_policy("snapkv", own.kept, window=WINDOW, kernel=KERNEL)
    assert got[0] == run_greedy(model, [prompt(60)], snapkv, MAX_NEW).of_row(0)[0]
    for call, kept in enumerate(got):
        assert [[head[own.kept :] for head in layer] for layer in kept] == [[tuple(range(60, 60 + call))] * 2] * 2
    assert make_policy("rocketkv", 512).scorer == make_policy("snapkv", 512, window=32, kernel=63).scorer


def test_bytes_read_and_held_as_worked_by_hand() -> None:
    """Float64, 8 numbers a head: a token is 2 * 8 * 8 bytes and a position, a page's summary 2 * 8 * 8 bytes."""
    own, model = sizes(12, 60), prepare(tiny())
    got = generate_tokens(model, torch.tensor([prompt(60)]), rocket(12), max_new_tokens=2).cache
    held = own.kept + 1
    pages = math.ceil(held / own.page)
    heads = 2 * 2
    assert nbytes_read(got.sequence) == heads * (own.attended * 132 + pages * own.channels * 8)
    assert got.nbytes == heads * (held * 132 + pages * 128 + 8)  # and two counts of tokens read
    assert got.nbytes == bytes_held(got.layers)
    scanned = pages * own.channels * 8 / (2 * 8 * 8)
    assert scanned <= 12 - own.attended + 1, "the other half of the budget pays for the scan"


def test_a_padded_batch_keeps_and_reads_equal_tokens_alone() -> None:
    """In one cache, where prompts of 150 and 45 tokens have pages of their own sizes."""
    model, prompts, policy = prepare(tiny("qwen3")), [prompt(150), prompt(45, seed=1)], rocket(8)
    assert (sizes(8, 150).page, sizes(8, 45).page) == (3, 2)
    ids = torch.tensor([prompts[0], [0] * 105 + prompts[1]])
    cache = KVCache(model.config, policy, prompt_length=[150, 45])
    padding = (ids != 0).long()
    out = model.generate(
        ids, attention_mask=padding, past_key_values=cache, max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=0
    )
    for row, one in enumerate(prompts):
        alone = run_greedy(model, [one], policy, MAX_NEW)
        assert alone.tokens[0] == out[row, 150:].tolist()
    cache.audit()


def test_blocks_keep_within_the_plan_and_a_copied_cache_goes_on() -> None:
    model, ids, own = prepare(tiny()), torch.tensor([prompt(72)]), sizes(12, 60)
    blocks = run_greedy(model, [ids[0, :60].tolist()], rocket(12, schedule="blocks", block=16), 3).of_row(0)
    assert all(len(head) == own.kept + 2 for layer in blocks[-1] for head in layer)
    cache = KVCache(model.config, rocket(12), prompt_length=60)
    out: list[Tensor] = []
    with torch.inference_mode():
        for part in ids.split([60, *[1] * 12], dim=1):
            if len(out) == 5:
                cache = fork(cache)
            out.append(model(part, past_key_values=cache).logits[:, -1])
    forced = score_pair(model, Pair(ids[0, :60].tolist(), ids[0, 60:].tolist()), rocket(12))
    expected = torch.stack([x[0].log_softmax(-1)[t] for x, t in zip(out, ids[0, 60:], strict=False)])
    torch.testing.assert_close(forced.logprobs, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_prompt_within_the_capacity_is_the_full_cache() -> None:
    """Also one that is shorter than the observation window, and at any larger budget."""
    model: PreTrainedModel = prepare(tiny())
    for length, budget in ((3, 64), (20, 64), (100, 1000), (100, 10**6), (100, 2**31 - 1)):
        policies = rocket(budget), make_policy("full")
        got, full = (run_greedy(model, [prompt(length)], policy, MAX_NEW) for policy in policies)
        assert (got.tokens, got.kept) == (full.tokens, full.kept)


def test_a_budget_that_reads_nothing_is_refused_and_a_scorer_makes_it_evict() -> None:
    with pytest.raises(ValueError, match="so a budget of 1 token per KV head is too small: it must be at least 2"):
        generate_tokens(prepare(tiny()), torch.tensor([prompt(20)]), rocket(1), max_new_tokens=2)
    parts = {"reader": {"class": "RocketKV"}, "scorer": {"class": "SnapKV"}}
    assert evicts({"budget": 64, "policy": parts})
    assert not evicts({"budget": 64, "policy": parts | {"scorer": None}})

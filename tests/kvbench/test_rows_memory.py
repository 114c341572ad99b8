"""What rows hold, by the storages alive: at most the variants' own bytes, one full cache and a fifth of both."""

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch
from kv_models import prompt, tiny
from live_bytes import Live
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.cache.attend import TorchBackend
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy

LENGTH, NEW = 240, 5
POLICIES = ("snapkv", "h2o", "cake")
BUDGETS = (40, 80)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Four layers of four KV heads: its cache is larger than what one layer computes with."""
    return prepare(tiny("llama", kv_heads=4, layers=4, dtype=torch.float32))


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_collection() -> Iterator[None]:
    """What is let go must be free at once: a device is full long before Python looks for garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alone(model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], live: Live) -> tuple[list[int], int]:
    """Bytes that the cache of each lone run holds at its end, and the most that one takes beyond its own."""
    held, working = [], 0
    for policy in policies:
        before = live.peak = live.now
        done = generate_tokens(model, ids, policy, max_new_tokens=NEW)
        held.append(live.now - before)
        working = max(working, live.peak - live.now)
        del done
        assert live.now == before, f"{policy.name} is not freed"
    return held, working


def test_a_batch_holds_its_sequences_and_one_full_cache(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "workspace", 0)  # layers that wait for others may take it
    examples = 3
    policies = [make_policy(slug, budget, schedule="prompt") for slug in POLICIES for budget in BUDGETS]
    every = [torch.tensor([prompt(LENGTH, seed)]) for seed in range(examples)]
    with Live() as live:
        for policy in policies:  # weights are counted as they are first used, buffers that are kept as they are made
            generate_tokens(model, every[0], policy, max_new_tokens=2)
        (full,), working = alone(model, every[0], [make_policy("full")], live)
        lone, _ = alone(model, every[0], policies, live)
        before = live.peak = live.now
        flight, rows, held, peaks = DecodeBatch(model), [], [], []
        for ids in every:
            rows += flight.admit([Request(script_of(ids), NEW)], policies)[0]
            held.append(live.now - before)
        prefills = live.peak - before
        while flight.in_flight:
            live.peak = live.now
            flight.step()
            held.append(live.now - before)
            peaks.append(live.peak - before)
    token = 4 * 2 * 4 * 8 * 4  # bytes: layers, key and value, heads, dimensions
    assert LENGTH * token < full < 1.3 * LENGTH * token
    assert sum(BUDGETS) * len(POLICIES) * token < sum(lone) < 1.6 * sum(BUDGETS) * len(POLICIES) * token
    assert len(rows) == examples * len(policies)
    assert max(held) <= 1.06 * examples * sum(lone)  # statistics of one policy have slots for the tokens of all
    assert prefills <= 1.2 * (examples * sum(lone) + full) + working
    assert max(peaks) <= 1.3 * max(held) + working  # sequences enter a table one layer after another


@pytest.mark.parametrize("slug", ["kivi", "ada_snapkv", "d2o", "gemfilter"])
def test_an_unreferenced_cache_is_freed_at_once(slug: str, model: PreTrainedModel) -> None:
    fields = {"layer": 1} if slug == "gemfilter" else {}
    policy = make_policy(slug) if slug == "kivi" else make_policy(slug, 40, **fields)
    ids = torch.tensor([prompt(90)])
    with Live() as live:
        generate_tokens(model, ids, policy, max_new_tokens=NEW)
        before = live.now
        done = generate_tokens(model, ids, policy, max_new_tokens=NEW)
        assert live.now > before + done.cache.nbytes // 2
        del done
        assert live.now == before

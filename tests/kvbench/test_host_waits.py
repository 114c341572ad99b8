"""Decoding steps at a budget without a moment in which a GPU's host waits, for every policy with dense stores."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from kv_models import CodePoints, tiny
from kv_models import prompt as words
from kv_presets import kinds
from op_tape import waits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench import KVCache, make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.cache.pre_passes import rate
from kvbench.engine import batch as engine
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.logits import next_logits
from kvbench.engine.prefill import prefill
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense

BUDGET, LENGTH = 40, 60
SETTLED = 3  # tokens after which every layer overwrites the slot it gave up
GROWING = ("snapkv", "pyramidkv")  # as presets; here they evict


def dense_and_evicting() -> list[str]:
    """One preset for every combination of parts that evicts from dense stores while decoding."""
    policies = {slug: make_policy(slug, BUDGET) for slug in kinds()}
    return [
        s for s, p in policies.items() if isinstance(p.store, Dense) and (p.schedule.decode == "evict" or s in GROWING)
    ]


def policy_of(slug: str) -> Policy:
    fields: dict[str, Any] = {"decode": "evict"} if slug in GROWING else {}
    if slug.endswith(("snapkv", "pyramidkv")):
        fields["window"] = 6
    return make_policy(slug, BUDGET, **fields)


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.tensor([words(length, seed)], device="cuda")


def isolated(cache: KVCache) -> KVCache:
    """The cache as the engine makes it; others read mask and positions once in every call, to check them."""
    for sequence in cache.sequences:
        sequence.isolated = True
    return cache


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """An error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NoWaits(TorchDispatchMode):
    """An error at an operation for which the host of a GPU would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not waits(func, args), f"the host waits in {func.name()}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slug", dense_and_evicting())
@torch.inference_mode()
def test_no_called_step_at_the_budget_reads_a_number_from_the_device(
    slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of a step as a GPU would run it, counted on a CPU."""
    monkeypatch.setattr("kvbench.cache.attend.backend_of", lambda like: TritonBackend())
    model = prepare(tiny(dtype=torch.float32))
    cache = isolated(KVCache(model.config, policy_of(slug), prompt_length=LENGTH, question=LENGTH - 6))
    logits, place = prefill(model, torch.tensor([words(LENGTH, 0)]), cache, CodePoints()), torch.full((1, 1), LENGTH)
    for index in range(SETTLED + 2):
        token = logits.argmax(-1, keepdim=True)
        rate(cache.sequence, logits, token)
        with NoWaits() if index >= SETTLED else nullcontext():
            logits, place = next_logits(model, token, place, cache), place + 1
    assert cache.kept_tokens().float().mean() < LENGTH, "it evicts"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("slug", dense_and_evicting())
@torch.inference_mode()
def test_no_step_at_the_budget_waits_alone_or_in_a_batch(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(tiny(dtype=torch.float32).to("cuda"))
    policy = policy_of(slug)
    cache = isolated(KVCache(model.config, policy, prompt_length=LENGTH, question=LENGTH - 6))
    logits, place = prefill(model, prompt(LENGTH), cache, CodePoints()), torch.full((1, 1), LENGTH, device="cuda")
    for index in range(SETTLED + 2):
        token = logits.argmax(-1, keepdim=True)
        rate(cache.sequence, logits, token)
        if index < SETTLED:
            logits, place = next_logits(model, token, place, cache), place + 1
            continue
        with refusing_to_wait():
            logits, place = next_logits(model, token, place, cache), place + 1
    assert cache.kept_tokens().float().mean() < LENGTH, "it evicts"
    flight = DecodeBatch(model)
    for seed in range(2):
        ids = prompt(LENGTH + seed, seed)
        flight.admit([Request(script_of(ids), SETTLED + 5, question=LENGTH - 6, encoder=CodePoints())], [policy])[0]
    for _ in range(SETTLED + 1):
        flight.step()

    def call(*args: Any) -> Tensor:
        with refusing_to_wait():
            return next_logits(*args)

    monkeypatch.setattr(engine, "next_logits", call)
    for _ in range(2):
        flight.step()

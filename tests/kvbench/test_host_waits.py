"""Decoding steps at a budget without a moment in which a GPU's host waits, for every policy with dense stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kv_models import CodePoints, tiny
from kv_models import prompt as words
from kv_presets import kinds
from op_tape import watched
from torch import Tensor

from kvbench import KVCache, make_policy
from kvbench.engine import batch as rows_module
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.pre_pass import rate_next
from kvbench.engine.prompt_pass import next_logits, prefill
from kvbench.engine.sequence import Request
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense

BUDGET, LENGTH = 40, 60
SETTLED = 3  # tokens after which every layer overwrites the slot it gave up
GROWING = ("snapkv", "pyramidkv")  # as presets; here they evict
NO_CUDA = "no CUDA device here: what a host waits for on a GPU is only stood in for"


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


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is at hand."""
    monkeypatch.setattr("kvbench.policies.scorers.roco.on_host", lambda x: False)
    monkeypatch.setattr("kvbench.policies.ranking.on_host", lambda x: False)


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny(dtype=torch.float32).to("cuda" if torch.cuda.is_available() else "cpu")
    model.set_attn_implementation("kvbench")
    return model


def prompt(length: int, model: Any, seed: int = 0) -> Tensor:
    return torch.tensor([words(length, seed)], device=model.device)


def decoded(model: Any, policy: Policy) -> Iterator[None]:
    """A prompt and some tokens after it, one at a time; yields before each of them, once it is at its budget."""
    cache = KVCache(model.config, policy, prompt_length=LENGTH, question=LENGTH - 6)
    logits = prefill(model, prompt(LENGTH, model), None, cache, CodePoints())
    place = torch.full((1, 1), LENGTH, device=model.device)
    for index in range(SETTLED + 3):
        token = logits.argmax(-1, keepdim=True)
        if index >= SETTLED:
            yield
        rate_next(cache, logits, token)
        logits, place = next_logits(model, token, None, place, cache), place + 1
    assert max(max(heads) for layer in cache.kept_tokens().tolist() for heads in layer) < LENGTH, "it evicts"


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """On a GPU, an error where the host waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stepped(model: Any, policies: list[Policy], waiting: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model's calls were watched to wait for, of rows: two examples under each policy."""
    seen: list[Any] = []
    flight = DecodeBatch(model)
    for seed in range(2):
        flight.admit(
            Request(prompt(LENGTH + seed, model, seed), SETTLED + 5, question=LENGTH - 6, encoder=CodePoints()),
            policies,
        )
    for _ in range(SETTLED + 1):
        flight.step()

    def call(*args: Any) -> Tensor:
        with waiting() as found:
            logits = next_logits(*args)
        seen.append(found)
        return logits

    monkeypatch.setattr(rows_module, "next_logits", call)
    for _ in range(2):
        flight.step()
    return seen


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda x: x.tolist(), ["tolist"]),
        (lambda x: x.cpu(), ["cpu"]),
        (lambda x: x[x > 0], ["aten::index.Tensor"]),
        (lambda x: torch.where(x > 0), ["aten::where"]),
        (lambda x: float(x[0]), ["__float__", "aten::item"]),
        (lambda x: bool(x[0]), ["__bool__", "aten::is_nonzero"]),
        (lambda x: torch.tensor([1.0]), ["aten::lift_fresh"]),
        (lambda x: x[(x + 1).argsort()].where(x > 0, 0.0), []),
    ],
)
def test_what_a_host_waits_for_is_seen(what: Any, expected: list[str]) -> None:
    with torch.inference_mode(), watched() as found:
        what(torch.ones(3))
    assert set(found) <= set(expected)
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("slug", dense_and_evicting())
def test_no_step_at_the_budget_lets_the_host_wait(slug: str, model: Any) -> None:
    with torch.inference_mode():
        steps = decoded(model, policy_of(slug))
        next(steps)
        with watched() as found:
            next(steps)
    assert found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
@pytest.mark.parametrize("slug", dense_and_evicting())
def test_on_a_gpu_no_step_at_the_budget_waits(slug: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        steps = decoded(model, policy_of(slug))
        next(steps)
        with refusing_to_wait():
            next(steps)
    stepped(model, [policy_of(slug)], refusing_to_wait, monkeypatch)

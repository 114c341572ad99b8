"""Decoding steps recorded and replayed: equal to the steps themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_models import prompt as words
from kv_models import tiny
from kv_presets import kinds
from op_tape import Tape, record

from kvbench import make_policy
from kvbench.cache.group import PolicyGroup
from kvbench.inference import generate as generating
from kvbench.inference.cuda_graph import check_graph
from kvbench.inference.generate import greedy
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense

BUDGET, LENGTH, NEW = 40, 60, 12
WITH_WINDOWS = ("p2a_snapkv", "caote_snapkv", "fastcaote_snapkv")


def dense_and_evicting() -> list[str]:
    """One preset for every combination of parts whose decoding evicts from dense stores and needs only the token."""
    policies = {slug: make_policy(slug, BUDGET) for slug in kinds()}
    return [
        slug
        for slug, policy in policies.items()
        if policy.schedule.decode == "evict" and isinstance(policy.store, Dense) and not policy.needs.surprisal
    ]


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's stand-in for CUDA graphs; on a machine with a GPU the graphs themselves are tested below."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(generating, "check_graph", lambda policy, device: None)
    monkeypatch.setattr("kvbench.policies.scorers.roco.at_hand", lambda x: False)
    monkeypatch.setattr("kvbench.policies.ranking.at_hand", lambda x: False)


def llama(family: str = "llama") -> Any:
    model = tiny(family, dtype=torch.float32)
    model.set_attn_implementation("kvbench")
    return model


def generate(model: Any, policy: Policy, ids: torch.Tensor, **how: Any) -> tuple[list[list[int]], list[Any]]:
    out = greedy(model, ids, policy, max_new_tokens=NEW, **how)
    return out.tokens, [layer.positions.sort(-1).values.tolist() for layer in out.cache.layers]


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([words(length, seed)])


def policy_of(slug: str, budget: int = BUDGET, **fields: Any) -> Policy:
    return make_policy(slug, budget, **({"window": 6} if slug in WITH_WINDOWS else {}), **fields)


@pytest.mark.parametrize("slug", dense_and_evicting())
def test_replayed_steps_equal_called_ones(slug: str, taped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    replays = []
    monkeypatch.setattr(Tape, "replay", lambda tape, own=Tape.replay: (replays.append(1), own(tape)))
    ids = prompt(LENGTH)
    assert generate(model, policy_of(slug), ids, cuda_graph=True) == generate(model, policy_of(slug), ids)
    assert len(replays) >= NEW - 5, "steps were recorded and replayed"


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_and_caps_replay_too(family: str, taped: None) -> None:
    model = llama(family)
    for slug in ("h2o", "caote_snapkv"):
        policy = policy_of(slug)
        assert generate(model, policy, prompt(LENGTH), cuda_graph=True) == generate(model, policy, prompt(LENGTH))


def test_a_batch_replays_until_one_of_its_sequences_ends(taped: None) -> None:
    model = llama()
    ids = torch.cat([prompt(LENGTH), prompt(LENGTH, seed=5)])
    plain, _ = generate(model, policy_of("h2o"), ids)
    eos = plain[0][8]  # the first sequence ends here, the other goes on
    both = [generate(model, policy_of("h2o"), ids, eos_token_ids=[eos], cuda_graph=g) for g in (True, False)]
    assert both[0] == both[1]
    assert len(both[0][0][0]) < NEW


def test_a_prompt_below_the_budget_is_recorded_when_it_has_grown_to_it(taped: None) -> None:
    model = llama()
    ids = prompt(BUDGET - 3)
    assert generate(model, policy_of("tova"), ids, cuda_graph=True) == generate(model, policy_of("tova"), ids)


def test_a_step_that_changes_a_number_of_the_host_is_refused(taped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(PolicyGroup, "at_budget", True)
    with pytest.raises(
        ValueError, match=r"snapkv changes layer 0\S* from step to step, so its step cannot be recorded"
    ):
        generate(model, make_policy("snapkv", BUDGET, window=6), prompt(LENGTH), cuda_graph=True)


@pytest.mark.parametrize(
    ("slug", "device", "sentence"),
    [
        ("h2o", "cpu", "engine.cuda_graph=true needs a CUDA device, got device=cpu"),
        ("full", "cuda", "full grows while decoding"),
        ("snapkv", "cuda", "snapkv grows while decoding"),
        ("sirllm", "cuda", "dense stores that need nothing but the token, and sirllm has no such"),
    ],
)
def test_what_cannot_be_recorded_is_refused(slug: str, device: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_graph(make_policy(slug, BUDGET), torch.device(device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("slug", dense_and_evicting())
def test_on_a_gpu_graphs_equal_the_steps(slug: str) -> None:
    model = llama().to("cuda")
    ids = prompt(LENGTH).to("cuda")
    assert generate(model, policy_of(slug), ids, cuda_graph=True) == generate(model, policy_of(slug), ids)

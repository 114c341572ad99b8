"""Decoding steps recorded and replayed, of one sequence and of a batch: equal to the steps themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_models import prompt as words
from kv_models import tiny
from kv_presets import kinds
from op_tape import Tape, record

from kvbench import KVCache, make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.inference import generate as generating
from kvbench.inference.cuda_graph import can_record, can_replay, check_graph
from kvbench.inference.generate import generate_tokens
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slots import GROWTH

BUDGET, LENGTH, NEW = 40, 60, 12
WITH_WINDOWS = ("p2a_snapkv", "caote_snapkv", "fastcaote_snapkv")


def dense() -> list[str]:
    """One preset for every combination of parts whose decoding needs only the token, growing and per-head ones too."""
    policies = {slug: make_policy(slug, BUDGET) for slug in (*kinds(), "full")}
    return [slug for slug, policy in policies.items() if can_record(policy) and policy.pre_pass is None]


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's stand-in for CUDA graphs; on a machine with a GPU the graphs themselves are tested below."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(generating, "check_graph", lambda policy, device: None)
    monkeypatch.setattr("kvbench.policies.scorers.roco.at_hand", lambda x: False)
    monkeypatch.setattr("kvbench.policies.ranking.at_hand", lambda x: False)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every replay."""
    found: list[int] = []
    monkeypatch.setattr(Tape, "replay", lambda tape, own=Tape.replay: (found.append(1), own(tape)))
    return found


def llama(family: str = "llama") -> Any:
    model = tiny(family, dtype=torch.float32)
    model.set_attn_implementation("kvbench")
    return model


def kept(cache: KVCache) -> list[Any]:
    """The positions held, by layer, sequence and KV head, in order."""
    return [
        [[sorted(n for n in head if n >= 0) for head in row] for row in layer.positions.tolist()]
        for layer in cache.layers
    ]


def generate(model: Any, policy: Policy, ids: torch.Tensor, **how: Any) -> tuple[list[list[int]], list[Any]]:
    out = generate_tokens(model, ids, policy, max_new_tokens=NEW, question=ids.shape[1] - 6, **how)
    return out.tokens, kept(out.cache)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([words(length, seed)])


def policy_of(slug: str, budget: int = BUDGET, **fields: Any) -> Policy:
    return make_policy(slug, budget, **({"window": 6} if slug in WITH_WINDOWS else {}), **fields)


@pytest.mark.parametrize("slug", dense())
def test_replayed_steps_equal_called_ones(slug: str, taped: None, replays: list[int]) -> None:
    model = llama()
    ids = prompt(LENGTH)
    assert generate(model, policy_of(slug), ids, cuda_graph=True) == generate(model, policy_of(slug), ids)
    assert len(replays) >= NEW - 5, "steps were recorded and replayed"


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


def test_a_batch_of_all_kinds_replays_while_its_sequences_stay_the_same(taped: None, replays: list[int]) -> None:
    """Growing, evicting and per-head sequences of two examples, the second of which joins later and ends earlier."""
    model = llama()
    policies = [policy_of(slug, budget) for slug in ("h2o", "tova", "caote_snapkv") for budget in (40, 56)]
    policies += [make_policy("full"), make_policy("ada_snapkv", 40, window=6), make_policy("snapkv", 40, window=6)]
    found = []
    for graph in (True, False):
        flight, done = DecodeBatch(model, cuda_graph=graph), []
        for seed, new in ((1, 24), (2, 9)):
            done += flight.admit(Request(prompt(LENGTH + seed, seed), new, question=LENGTH - 6), policies)
            flight.step()
        while flight.in_flight:
            flight.step()
        assert [row.error for row in done] == [None] * len(done)
        found.append([(row.tokens, kept(row.cache), row.cache.nbytes, row.cache.peak_nbytes) for row in done])
    assert found[0] == found[1]
    assert len(replays) > 10


def test_a_cache_that_grows_is_recorded_anew_when_it_got_more_room(taped: None, replays: list[int]) -> None:
    model, ids = llama(), prompt(LENGTH)
    long = {"max_new_tokens": GROWTH + 20}
    graphs = generate_tokens(model, ids, make_policy("full"), cuda_graph=True, **long)
    plain = generate_tokens(model, ids, make_policy("full"), **long)
    assert (graphs.tokens, kept(graphs.cache)) == (plain.tokens, kept(plain.cache))
    assert graphs.cache.nbytes == plain.cache.nbytes
    assert GROWTH < len(replays) < GROWTH + 20


@pytest.mark.parametrize(
    ("slug", "device", "sentence"),
    [
        ("h2o", "cpu", "engine.cuda_graph=true needs a CUDA device, got device=cpu"),
        ("kivi", "cuda", "that attend, then evict, and need nothing but the token; kivi has no such steps"),
        ("sirllm", "cuda", "and need nothing but the token; sirllm has no such steps"),
    ],
)
def test_what_cannot_be_recorded_is_refused(slug: str, device: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_graph(make_policy(slug, BUDGET), torch.device(device))


@pytest.mark.parametrize(("family", "layers"), [("gemma3n", "read what others store"), ("llama4", "see chunks")])
def test_layers_that_do_not_read_what_they_store_are_refused(family: str, layers: str) -> None:
    with pytest.raises(ValueError, match=f"has layers that {layers}.*: use engine.cuda_graph=false$"):
        can_replay(tiny(family).config, asked=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("slug", dense())
def test_on_a_gpu_graphs_equal_the_steps(slug: str) -> None:
    model = llama().to("cuda")
    ids = prompt(LENGTH).to("cuda")
    assert generate(model, policy_of(slug), ids, cuda_graph=True) == generate(model, policy_of(slug), ids)

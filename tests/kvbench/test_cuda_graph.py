"""Decoding steps recorded as CUDA graphs and replayed equal the steps themselves, of one sequence and of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_models import prompt as words
from kv_models import tiny
from kv_presets import kinds

from kvbench import KVCache, make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.cuda_graph import Recorder
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.models.replay import can_record, can_replay, check_graph
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slots import GROWTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET, LENGTH, NEW = 40, 60, 12
WITH_WINDOWS = ("p2a_snapkv", "caote_snapkv", "fastcaote_snapkv")


def dense() -> list[str]:
    """One preset for every combination of parts whose decoding needs only the token, growing and per-head ones too."""
    policies = {slug: make_policy(slug, BUDGET) for slug in (*kinds(), "full")}
    return [slug for slug, policy in policies.items() if can_record(policy) and policy.pre_pass is None]


def on_a_gpu(test: Any) -> Any:
    """Marks a test that records CUDA graphs."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    return pytest.mark.gpu(skipped(test))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every replay."""
    found: list[int] = []
    own = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(1), own(graph)))
    return found


def llama(family: str = "llama") -> Any:
    model = tiny(family, dtype=torch.float32).to(DEVICE)
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
    return torch.tensor([words(length, seed)], device=DEVICE)


def policy_of(slug: str, budget: int = BUDGET, **fields: Any) -> Policy:
    return make_policy(slug, budget, **({"window": 6} if slug in WITH_WINDOWS else {}), **fields)


@on_a_gpu
@pytest.mark.parametrize("slug", dense())
def test_replayed_steps_equal_called_ones(slug: str, replays: list[int]) -> None:
    model = llama()
    ids = prompt(LENGTH)
    assert generate(model, policy_of(slug), ids, cuda_graph=True) == generate(model, policy_of(slug), ids)
    assert len(replays) >= NEW - 5, "steps were recorded and replayed"


@on_a_gpu
def test_a_batch_of_all_kinds_replays_while_its_sequences_stay_the_same(replays: list[int]) -> None:
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


RIDING: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("h2o", (40,)),
    ("ada_snapkv", (40,)),
    ("snapkv", (40, 56)),
    ("h2o", (140,)),
    ("caote_snapkv", (40,)),
    ("full", (40,)),
    ("tova", (56,)),
    ("tova", (40,)),
)


def riding(graph: bool, some: Sequence[Any], first: int, apart: int) -> tuple[DecodeBatch, list[LiveSequence]]:
    """Sequences of some policies, each of which ends `apart` steps after the one before, every other by a stop."""
    flight, rows = DecodeBatch(llama(), cuda_graph=graph), []
    for index, (slug, budgets) in enumerate(some):
        new = first + apart * index
        stop = (lambda tokens, new=new: len(tokens) == new) if index % 2 else None
        ids = prompt(max(LENGTH, *budgets) + index, index)
        asked = Request(ids, new + 20 * (index % 2), question=LENGTH - 6, stop=stop)
        window = {"window": 6} if "snapkv" in slug else {}
        policies = [make_policy(slug, budget, **window) for budget in budgets]
        rows += flight.admit(asked, policies)
    return flight, rows


def ended(rows: list[LiveSequence]) -> list[Any]:
    """What became of sequences; their caches are audited."""
    found = []
    for row in rows:
        assert row.cache is not None
        row.cache.audit()
        held = row.cache.nbytes, row.cache.peak_nbytes, row.cache.spare_nbytes
        found.append((row.error, row.tokens, row.decode_steps, kept(row.cache), *held))
    return found


@on_a_gpu
def test_sequences_that_end_one_by_one_are_recorded_once_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    found, recorded = [], []
    own = Recorder._record
    monkeypatch.setattr(Recorder, "_record", lambda *args: (recorded.append(len(args[-1])), own(*args))[1])
    for graph in (True, False):
        flight, rows = riding(graph, RIDING, first=10, apart=4)
        live = []
        while flight.in_flight:
            assert all(row.done for row in flight.step())
            assert flight.in_flight == sum(not row.done for row in rows)
            live.append(flight.in_flight)
            if flight.cache and flight.cache.batch:
                places = flight.cache.batch.slots.places[:, 0].tolist()
                assert places == [row.position for row in flight.sequences], "riders stay where they ended"
        found.append((ended(rows), live))
    assert found[0] == found[1]
    assert recorded == [9, 8, 4, 2, 1], "as many sequences as are in the batch"


EVENTS = "the rider breaks", "the rider is dropped", "another is dropped", "one is admitted", "a store has to grow"


@on_a_gpu
@pytest.mark.parametrize("event", EVENTS)
def test_a_rider_harms_nobody_and_goes_when_others_come_or_go_or_grow(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.policies.stores.slots.GROWTH", 8 if event == "a store has to grow" else GROWTH)
    found, nbytes = [], []
    for graph in (True, False):
        flight, rows = riding(graph, RIDING[:2] + RIDING[3:5], first=4, apart=8)
        while not rows[0].done:
            flight.step()
        assert flight.in_flight == 3
        nbytes.append(flight.nbytes)
        rider = rows[0].cache
        if event == "the rider breaks" and graph:
            break_rider(flight)
        elif event == "the rider is dropped":
            flight.drop(rows[:1])
        elif event == "another is dropped":
            flight.drop([rows.pop()])
        elif event == "one is admitted":
            rows += flight.admit(Request(prompt(LENGTH), 9), [policy_of("h2o")])
        elif event == "a store has to grow":
            for _ in range(6):
                flight.step()
        assert len(flight.sequences) == flight.in_flight + (graph and event == "the rider breaks")
        while flight.in_flight:
            flight.step()
        found.append(ended(rows))
    assert found[0] == found[1]
    assert [row[0] for row in found[0]] == [None] * len(found[0])
    assert rider is not None
    assert nbytes[0] - nbytes[1] > 0.9 * rider.nbytes, "the memory of a rider is not free"


@torch.inference_mode()
def break_rider(flight: DecodeBatch) -> None:
    """The keys and values of the first sequence, in one group with another, are no numbers any more."""
    cache = flight.cache
    assert cache is not None
    assert cache.batch is not None
    assert cache.groups[0].size == 2
    slots = cache.batch.slots
    for layer, starts in enumerate(slots.starts[:, 0]):
        for start, count in zip(starts.tolist(), slots.counts[layer, 0].tolist(), strict=True):
            for memory in (slots.keys, slots.values):
                memory[layer][start : start + count] = torch.nan


@on_a_gpu
def test_a_step_that_cannot_be_recorded_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Capture fails inside the model's second layer: one warning, and no answer changes."""
    model, found = llama(), []
    own = model.model.layers[1].forward

    def fails_in_capture(*args: Any, **how: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return own(*args, **how)

    monkeypatch.setattr(model.model.layers[1], "forward", fails_in_capture)
    for graph in (True, False):
        flight = DecodeBatch(model, cuda_graph=graph, strict=False)
        rows = flight.admit(Request(prompt(LENGTH), 12), [policy_of("h2o"), policy_of("tova", 90)])
        while flight.in_flight:
            flight.step()
        found.append(ended(rows))
    assert found[0] == found[1]
    assert len([one for one in caplog.records if "cannot be recorded" in one.message]) == 1
    with pytest.raises(ValueError, match=r"cannot be recorded.*: use engine\.cuda_graph=false"):
        generate(model, policy_of("h2o"), prompt(LENGTH), cuda_graph=True)


@on_a_gpu
def test_a_cache_that_grows_is_recorded_anew_when_it_has_more_slots(replays: list[int]) -> None:
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
        ("kivi", "cuda", "that attend, then evict one token; kivi does not support it"),
        ("sirllm", "cuda", "then evict one token; sirllm does not support it"),
    ],
)
def test_what_cannot_be_recorded_is_refused(slug: str, device: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_graph(make_policy(slug, BUDGET), torch.device(device))


@pytest.mark.parametrize(("family", "layers"), [("gemma3n", "use the keys and values of other layers")])
def test_layers_that_do_not_read_what_they_store_are_refused(family: str, layers: str) -> None:
    with pytest.raises(ValueError, match=f"has layers that {layers}.*: use engine.cuda_graph=false$"):
        can_replay(tiny(family).config, required=True)

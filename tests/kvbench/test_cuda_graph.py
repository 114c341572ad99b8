"""Decoding steps that are recorded and replayed equal the steps themselves, of one sequence and of a batch.

Steps are recorded as CUDA graphs where there is a GPU, and by `op_tape` elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from kv_models import prompt as words
from kv_models import tiny
from kv_presets import kinds
from kv_runs import finish, kept_now
from kv_watch import Ledger, ledger_of
from op_tape import Tape, record
from parameters import few_fast
from torch import Tensor

from kvbench import make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.cache.joining import can_record
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.recorder import Recorder
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.models.replay import check_graph
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.h2o import H2O
from kvbench.policies.stores.slots import GROWTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET, LENGTH, NEW = 40, 60, 9
CODES = ("fp8", "int8", "int4", "turboquant")
WITH_WINDOWS = ("snapkv", "ada_snapkv", "p2a_snapkv", "caote_snapkv", "fastcaote_snapkv")


def dense() -> list[str]:
    """One preset for every combination of parts whose decoding needs only the token, growing and per-head ones too."""
    policies = {slug: make_policy(slug, BUDGET) for slug in (*kinds(), "full", *CODES)}
    return [slug for slug, policy in policies.items() if can_record(policy) and policy.pre_pass is None]


class Counts:
    """Numbers of replays and of recordings."""

    def __init__(self) -> None:
        self.replays = self.recordings = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found = Counts()
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
        monkeypatch.setattr(torch.cuda, "graph", record)
        monkeypatch.setattr("kvbench.cache.attend.backend_of", lambda like: TritonBackend())
        monkeypatch.setattr("kvbench.policies.constants.on_host", lambda x: False)
    replay, recorded = torch.cuda.CUDAGraph.replay, Recorder._record

    def counted(graph: Any) -> None:
        found.replays += 1
        replay(graph)

    def recording(recorder: Recorder, *args: Any) -> Any:
        found.recordings += 1
        return recorded(recorder, *args)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    monkeypatch.setattr(Recorder, "_record", recording)
    return found


def llama() -> Any:
    return prepare(tiny(dtype=torch.float32).to(DEVICE))


def request(length: int, new: int, seed: int = 0, **fields: Any) -> Request:
    script = script_of(torch.tensor([words(length, seed)], device=DEVICE))
    return Request(script, new, question=length - 6, watch=(Ledger(),), **fields)


def policy_of(slug: str, budget: int = BUDGET, **fields: Any) -> Policy:
    return make_policy(slug, budget, **({"window": 6} if slug in WITH_WINDOWS else {}), **fields)


def finished(flight: DecodeBatch, rows: Sequence[LiveSequence]) -> list[Any]:
    """What becomes of sequences; their caches are audited."""
    finish(flight)
    found = []
    for row in rows:
        row.cache.audit()
        held = row.cache.nbytes, row.cache.peak_nbytes, row.cache.spare_nbytes
        shown = ledger_of(row.cache.sequence)
        found.append((row.error, row.tokens, row.decode_steps, kept_now(row.cache), *held, shown))
    return found


@pytest.mark.parametrize("slug", few_fast(dense(), dense()[::2], pytest.mark.slow("replays every kind")))
def test_replayed_steps_equal_called_ones(slug: str, counts: Counts) -> None:
    model, found = llama(), []
    for graph in (True, False):
        flight = DecodeBatch(model, cuda_graph=graph)
        found.append(finished(flight, flight.admit([request(LENGTH, NEW)], [policy_of(slug)])[0]))
    assert found[0] == found[1]
    assert counts.replays >= NEW - 4, "steps were recorded and replayed"


@pytest.mark.parametrize("slug", ["kivi", "kcvc", "ott"])
def test_groups_that_are_encoded_between_two_steps_do_not_end_the_recording(slug: str, counts: Counts) -> None:
    """Two sequences: each encodes a group after every eighth of its tokens."""
    found, more = [], {"outliers": 2, "auxiliary": 4, "skip_layers": []} if slug == "ott" else {}
    policy = make_policy(slug, group=8, residual=8, **more)
    for graph in (True, False):
        flight = DecodeBatch(llama(), cuda_graph=graph)
        rows = [row for length in (60, 63) for row in flight.admit([request(length, 40)], [policy])[0]]
        found.append(finished(flight, rows))
    assert found[0] == found[1]
    assert counts.recordings == 1
    assert counts.replays >= 37


def test_steps_between_two_evictions_of_several_tokens_are_replayed(counts: Counts) -> None:
    policies, found = (
        [policy_of("h2o"), *(policy_of(slug, decode="evict", every=6) for slug in ("h2o", "snapkv", "knorm"))],
        [],
    )
    for graph in (True, False):
        flight = DecodeBatch(llama(), cuda_graph=graph)
        found.append(finished(flight, flight.admit([request(LENGTH, 40)], policies)[0]))
    assert found[0] == found[1]
    assert counts.replays >= 24, "one step of six evicts, and two after the first are called"


def continuous(graph: bool, policies: Sequence[Policy]) -> tuple[list[Any], int]:
    """8 sequences in flight, answers of 10 to 47 tokens, new ones admitted as others finish; and the steps taken."""
    flight, rows, random, steps = DecodeBatch(llama(), cuda_graph=graph), list[LiveSequence](), Random(0), 0
    while flight.in_flight or len(rows) < 20:
        while flight.in_flight < 8 and len(rows) < 20:
            asked = request(LENGTH + random.randrange(20), random.randrange(10, 48), len(rows))
            rows += flight.admit([asked], [policies[len(rows) % len(policies)]])[0]
        flight.step()
        steps += 1
    return finished(flight, rows), steps


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param([policy_of("h2o")], marks=pytest.mark.slow("decodes 20 answers twice")),
        [policy_of("h2o"), policy_of("h2o", 56), policy_of("tova"), policy_of("ada_snapkv"), make_policy("full")],
        pytest.param(
            [policy_of("h2o"), policy_of("h2o", 400), policy_of("tova", 100)],
            marks=pytest.mark.slow("decodes 20 answers twice"),
        ),
    ],
    ids=["one policy", "five policies", "two below their budgets"],
)
def test_most_steps_are_replayed_while_sequences_come_and_go(policies: Sequence[Policy], counts: Counts) -> None:
    found, steps = continuous(True, policies)
    assert counts.replays > 0.85 * steps
    assert found == continuous(False, policies)[0]


def test_a_sequence_below_its_budget_stops_no_replay(counts: Counts) -> None:
    """It takes the place of another one below its budget; the new kind before costs one step."""
    flight = DecodeBatch(llama(), cuda_graph=True)
    rows = flight.admit([request(LENGTH, 40)], [policy_of("h2o")])[0]
    for called in (1, 0):
        asked = request(LENGTH, 20, called, stop=lambda tokens: len(tokens) == 6)
        rows += flight.admit([asked], [policy_of("h2o", 100)])[0]
        before = counts.replays
        for _ in range(5):
            flight.step()
        assert counts.replays - before == 5 - called
    assert all(row[0] is None for row in finished(flight, rows))


def test_sequences_that_finish_one_by_one_are_recorded_anew_when_most_places_are_empty(counts: Counts) -> None:
    found = []
    for graph in (True, False):
        flight, rows = DecodeBatch(llama(), cuda_graph=graph), []
        for index in range(16):
            stop = (lambda tokens, new=10 + 2 * index: len(tokens) == new) if index % 2 else None
            asked = request(LENGTH + index, 10 + 2 * index + 20 * (index % 2), index, stop=stop)
            rows += flight.admit([asked], [policy_of(("h2o", "tova")[index // 8])])[0]
        found.append(finished(flight, rows))
    assert found[0] == found[1]
    assert counts.recordings == 4, "of 16, 8, 4 and 1 places"


def test_a_dropped_sequence_does_not_disturb_the_others(counts: Counts) -> None:
    found = []
    for graph in (True, False):
        flight = DecodeBatch(llama(), cuda_graph=graph)
        first, second = (
            flight.admit([request(LENGTH, 20, n)], [policy_of("h2o"), policy_of("tova")])[0] for n in (1, 2)
        )
        for _ in range(5):
            flight.step()
        flight.drop(first)
        found.append(finished(flight, second))
    assert found[0] == found[1]


def test_stores_that_grow_do_not_end_the_recording(counts: Counts) -> None:
    """A store grows twice; the arena and the bound of lengths grow once each."""
    model, found = llama(), []
    for graph in (True, False):
        flight = DecodeBatch(model, cuda_graph=graph)
        asked = request(LENGTH, 2 * GROWTH + 20)
        found.append(finished(flight, flight.admit([asked], [make_policy("full"), policy_of("h2o", 500)])[0]))
    assert found[0] == found[1]
    assert counts.replays > 2 * GROWTH
    assert counts.recordings <= 5


def test_scores_that_are_nan_end_their_sequence_only(counts: Counts) -> None:
    flight = DecodeBatch(llama(), cuda_graph=True)
    first, second = flight.admit([request(LENGTH, 12)], [policy_of("h2o"), policy_of("tova")])[0]
    for _ in range(4):
        flight.step()
    assert flight._recorded.tables.version
    with torch.inference_mode():
        for x in (layer.store.memory["attention_sum"] for layer in first.cache.sequence.layers):
            x.fill_(torch.nan)
    finish(flight)
    assert "scores that are not numbers" in str(first.error)
    assert second.error is None


def test_a_step_that_cannot_be_recorded_is_called(
    counts: Counts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Recording fails inside the model's second layer: one warning, and no answer changes."""
    model, found, recording = llama(), [], list[int]()
    own, recorded = model.model.layers[1].forward, Recorder._record

    def fails_in_capture(*args: Any, **how: Any) -> Any:
        if recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        return own(*args, **how)

    def noted(*args: Any) -> Any:
        recording.append(1)
        try:
            return recorded(*args)
        finally:
            recording.clear()

    monkeypatch.setattr(model.model.layers[1], "forward", fails_in_capture)
    monkeypatch.setattr(Recorder, "_record", noted)
    for graph in (True, False):
        flight = DecodeBatch(model, cuda_graph=graph, strict=False)
        found.append(
            finished(flight, flight.admit([request(LENGTH, 12)], [policy_of("h2o"), policy_of("tova", 90)])[0])
        )
    assert found[0] == found[1]
    assert len([one for one in caplog.records if "cannot be recorded" in one.message]) == 1
    flight = DecodeBatch(model, cuda_graph=True)
    (row,) = flight.admit([request(LENGTH, 12)], [policy_of("h2o")])[0]
    finish(flight)
    assert isinstance(row.error, ValueError)
    assert str(row.error).endswith(": use engine.cuda_graph=false")


@dataclass(frozen=True)
class Breaks(H2O):
    """A scorer that raises an error in its second decoding step, which is recorded, or reads a number on the host."""

    reads: bool = False
    calls: list[int] = field(default_factory=list, hash=False, compare=False)

    def score(self, observation: Observation, state: State) -> Tensor:
        self.calls.append(observation.phase == "decode")
        if sum(self.calls) > 1:
            if not self.reads:
                raise ZeroDivisionError("of the scorer")
            observation.keys.sum().item()
        return super().score(observation, state)


@pytest.mark.parametrize("strict", [True, False])
def test_an_error_of_a_scorer_in_a_recorded_step_is_the_error_of_its_sequence(strict: bool, counts: Counts) -> None:
    flight = DecodeBatch(llama(), cuda_graph=True, strict=strict)
    own = [Policy(scorer=Breaks(), budget=budget) for budget in (BUDGET, BUDGET + 15)]
    *broken, other = flight.admit([request(LENGTH, 12)], [*own, policy_of("tova")])[0]
    finish(flight)
    assert [repr(one.error) for one in broken] == ["ZeroDivisionError('of the scorer')"] * 2
    assert other.error is None
    assert len(other.tokens) == 12


def test_a_scorer_that_waits_for_the_device_is_called_in_steps_that_are_not_recorded(
    counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    flight = DecodeBatch(llama(), cuda_graph=True, strict=False)
    rows = flight.admit([request(LENGTH, 12)], [Policy(scorer=Breaks(reads=True), budget=BUDGET)])[0]
    finish(flight)
    assert [(one.error, len(one.tokens)) for one in rows] == [(None, 12)]
    (warning,) = (one.message for one in caplog.records if "cannot be recorded" in one.message)
    assert "not permitted when stream is capturing" in warning


@pytest.mark.parametrize(
    ("slug", "device", "sentence"),
    [
        ("h2o", "cpu", "engine.cuda_graph=true needs a CUDA device, got device=cpu"),
        ("gear", "cuda", "that attend, then evict; gear does not support it"),
        ("sirllm", "cuda", "then evict; sirllm does not support it"),
    ],
)
def test_policies_that_cannot_be_recorded_are_refused(slug: str, device: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_graph(make_policy(slug, BUDGET), torch.device(device))


@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3"])
def test_layers_that_read_others_differ_in_shape_or_store_latents_are_replayed(family: str, counts: Counts) -> None:
    model, found = prepare(tiny(family, dtype=torch.float32).to(DEVICE)), []
    for graph in (True, False):
        flight = DecodeBatch(model, cuda_graph=graph)
        found.append(finished(flight, flight.admit([request(LENGTH, NEW)], [policy_of("h2o"), policy_of("full")])[0]))
    assert found[0] == found[1]
    assert counts.replays >= NEW - 4, "steps were recorded and replayed"

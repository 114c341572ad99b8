"""A score that is no number ends its own example, in a sentence that names policy and layer."""

from dataclasses import dataclass, replace

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import finish
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, ScoreError, make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.cache.joining import can_join
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.knorm import KNorm

LENGTH, BUDGET = 40, 24


@dataclass(frozen=True)
class Divided(KNorm):
    """0 / 0 for the token at one position."""

    at: int = 0
    first: int = 0

    def score(self, observation: Observation, state: State) -> Tensor:
        return super().score(observation, state).masked_fill(observation.positions == self.at, torch.nan)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.first)


def policy(at: int, schedule: str = "prompt", protects: int = 0) -> Policy:
    made = make_policy("knorm", BUDGET, schedule=schedule, decode="evict")
    return replace(made, name="divided", scorer=Divided(at=at, first=protects))


def model() -> PreTrainedModel:
    return prepare(tiny("llama"))


def asked(seed: int, new: int = 6) -> Request:
    return Request(script_of(torch.tensor([prompt(LENGTH, seed)])), new)


@pytest.mark.parametrize("schedule", ["prompt", "blocks"])
@pytest.mark.parametrize("at", [3, LENGTH + 1], ids=["in the prompt", "decoded"])
def test_a_score_that_is_no_number_is_one_sentence(at: int, schedule: str) -> None:
    sentence = r"^divided gave tokens of layer 0 scores that are not numbers \(NaN\): [^.]+$"
    with pytest.raises(FloatingPointError, match=sentence):
        generate_tokens(model(), asked(1).prompt, policy(at, schedule), max_new_tokens=6)


def test_a_token_that_stays_in_any_case_needs_no_score() -> None:
    out = generate_tokens(model(), asked(1).prompt, policy(at=3, protects=4), max_new_tokens=6)
    assert all((layer.positions == 3).any(-1).all() for layer in out.cache.layers)


@pytest.mark.parametrize("at", [3, LENGTH + 1], ids=["in the prompt", "decoded"])
def test_a_broken_score_ends_only_its_own_sequence(at: int) -> None:
    running, good = model(), make_policy("knorm", BUDGET, decode="evict")
    broken = policy(at)
    alone = generate_tokens(running, asked(1).prompt, good, max_new_tokens=6)
    rows = DecodeBatch(running)
    (wrong, right), (other,) = rows.admit([asked(1)], [broken, good])[0], rows.admit([asked(1)], [good])[0]
    finish(rows)
    assert isinstance(wrong.error, FloatingPointError)
    assert "divided gave tokens of layer 0" in str(wrong.error)
    for row in (right, other):
        assert row.error is None
        assert row.tokens == alone.tokens[0]


def test_a_decoding_step_on_a_gpu_does_not_read_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It flags them on the device. The audit reads the flags, although the token was evicted since."""
    monkeypatch.setattr("kvbench.cache.attend.backend_of", lambda like: TritonBackend())
    running = model()
    cached = KVCache(running.config, policy(at=LENGTH + 1))
    with torch.inference_mode():
        running(torch.tensor([prompt(LENGTH, 1)]), past_key_values=cached)
        cached.audit()
        for token in range(5):
            running(torch.tensor([[token + 7]]), past_key_values=cached)
    assert not any((layer.positions == LENGTH + 1).any() for layer in cached.layers)
    with pytest.raises(ScoreError, match="divided gave tokens of layer 0") as raised:
        cached.audit()
    assert raised.value.sequences == {0}
    cached.audit()  # the error was reported


@pytest.mark.parametrize("at_once", [False, True], ids=["general path", "table"])
def test_flags_of_a_gpu_end_their_own_sequence(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.cache.attend.backend_of", lambda like: TritonBackend())
    monkeypatch.setattr("kvbench.cache.tables.can_join", lambda sequence: at_once and can_join(sequence))
    running, good = model(), make_policy("knorm", BUDGET, decode="evict")
    alone = generate_tokens(running, asked(1).prompt, good, max_new_tokens=6)
    flight = DecodeBatch(running)
    wrong, right = flight.admit([asked(1)], [policy(at=LENGTH + 1), good])[0]
    finish(flight)
    assert isinstance(wrong.error, ScoreError)
    assert "divided gave tokens of layer 0" in str(wrong.error)
    assert right.error is None
    assert right.tokens == alone.tokens[0]

"""Divergence from the full cache: recorded numbers, an independent computation, and the answers of free decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from task_data import GOLDEN
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvbench
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.divergence import divergence_of, full_cache, token_divergence
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.errors import ConfigError
from kvbench.results.samples import Divergence

SMALL: dict[str, Any] = {"tasks": "niah", "lengths": [300], "depths": [0.0, 0.5], "repeats": 1, "max_new_tokens": 4}
PROMPT = prompt(48)
SINKS, RECENT = 4, 12


def recorded() -> list[dict[str, Any]]:
    path = GOLDEN / "additions3" / "divergence.jsonl"
    if not path.is_file():
        pytest.skip(f"the recorded numbers are not at {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_number_of_a_token_equals_the_recorded_one() -> None:
    for case in (case for case in recorded() if "full" in case):
        full, policy = ([[float(x) for x in row[: case["vocab"]]] for row in case[name]] for name in ("full", "policy"))
        expected = zip(*(map(float, case[name]) for name in KEYS), strict=True)
        for p, q, token, numbers in zip(full, policy, case["forced"], expected, strict=True):
            (found,) = token_divergence(
                torch.tensor(p, dtype=torch.float64), torch.tensor([q], dtype=torch.float64), token
            )
            assert tuple(found) == pytest.approx(numbers, rel=1e-6, abs=1e-7), case["case"]


KEYS = ("kl", "delta_logprob", "delta_p", "same_top", "agrees")


def test_the_first_divergence_of_an_answer_equals_the_recorded_one() -> None:
    for case in (case for case in recorded() if "full" in case):
        kl = [None if x == "inf" else x for x in case["kl"]]
        one = Divergence("", kl, [], [], [], [int(x) for x in case["agrees"]])
        assert one.first == case["first_divergence"]
        assert one.mean_kl == pytest.approx(float(case["example"]["mean_kl"]), rel=1e-6)


@torch.inference_mode()
def step_logits(model: PreTrainedModel, answer: list[int], kept: list[int]) -> Tensor:
    """Raw logits [n,V] before every token of an answer, with a prompt of which only `kept` stay: transformers alone."""
    cache = DynamicCache(config=model.config)
    rows = [model(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True).logits[0, -1]]
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    for place, token in enumerate(answer[:-1], start=len(PROMPT)):
        where = torch.tensor([[place]])
        rows.append(model(torch.tensor([[token]]), position_ids=where, past_key_values=cache).logits[0, -1])
    return torch.stack(rows)


def compared(model: PreTrainedModel, request: Request, *policies: kvbench.Policy) -> list[LiveSequence]:
    batch = DecodeBatch(model)
    sequences = batch.admit([request], policies, reference=full_cache())[0]
    while batch.in_flight:
        batch.step()
    assert not batch.sequences
    return sequences


def result(sequence: LiveSequence) -> Divergence:
    assert sequence.reference is not None
    return divergence_of("", sequence.divergences)


@pytest.mark.parametrize("given", [(), tuple(prompt(60)[50:])])
def test_a_policy_differs_from_full_as_transformers_alone_computes_it(given: tuple[int, ...]) -> None:
    eager = tiny().double()
    eager.set_attn_implementation("eager")
    kept = [*range(SINKS), *range(len(PROMPT) - RECENT, len(PROMPT))]
    request = Request(script_of(torch.tensor([PROMPT])), len(given) or 9, dictated=given)
    policy = kvbench.make_policy("streamingllm", budget=SINKS + RECENT, decode="grow", sinks=SINKS)
    (sequence,) = compared(prepare(tiny().double()), request, policy)
    p, q = (step_logits(eager, sequence.tokens, places).log_softmax(-1) for places in (range(len(PROMPT)), kept))
    tokens = torch.tensor(sequence.tokens)[:, None]
    assert (tokens[:, 0].tolist() == list(given)) if given else p.argmax(-1).equal(tokens[:, 0])
    found, kl = result(sequence), (p.exp() * (p - q)).sum(-1)
    assert found.kl == pytest.approx(kl.clamp(min=0).tolist(), rel=1e-5, abs=1e-12)
    assert kl[1:].min() > 1e-6
    assert found.delta_logprob == pytest.approx((q - p).gather(1, tokens)[:, 0].tolist(), rel=1e-5, abs=1e-12)
    assert found.delta_p == pytest.approx((q.exp() - p.exp()).gather(1, tokens)[:, 0].tolist(), rel=1e-5, abs=1e-12)
    assert found.same_top == (p.argmax(-1) == q.argmax(-1)).int().tolist()
    assert found.agrees == (q.argmax(-1) == tokens[:, 0]).int().tolist()


def test_full_against_itself_is_exactly_zero_in_a_batch_and_alone() -> None:
    model, request = prepare(tiny()), Request(script_of(torch.tensor([PROMPT])), 12)
    others = [kvbench.make_policy(name, budget=16) for name in ("knorm", "random")]
    for policies in ([full_cache()], [*others, full_cache()]):
        found = result(compared(model, request, *policies)[-1])
        assert found.kl == found.delta_logprob == found.delta_p == [0.0] * 12
        assert found.same_top == found.agrees == [1] * 12


def test_a_resumed_run_has_the_numbers_of_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {**SMALL, "policies": "knorm", "budgets": 40, "divergence": True}
    kvbench.evaluate(tiny_model, **asked, limit=1, out=tmp_path)
    (resumed,) = kvbench.evaluate(tiny_model, **asked, batch=1, out=tmp_path)
    (together,) = kvbench.evaluate(tiny_model, **asked)
    for one, other in zip(resumed.samples, together.samples, strict=True):
        assert one.divergence is not None
        assert other.divergence is not None
        assert one.divergence.kl == pytest.approx(other.divergence.kl, rel=1e-3)  # rounding depends on the batch
    assert resumed.prefill_seconds is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": "perplexity", "data_dir": "text.txt", "length": 64}, "only scores given texts"),
        ({"generation.temperature": 0.7, **SMALL}, "greedy answer of the full cache"),
        (
            {**SMALL, "policies": "kvpress", "policy.press": {"_target_": "kvpress.KnormPress"}},
            "feeds every policy the same answer, and kvpress has a cache of its own",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three " * 40)
    with pytest.raises(ConfigError, match=message) as caught:
        kvbench.evaluate(tiny_model, **{"policies": "snapkv", "budgets": 40, "limit": 1, **fields}, divergence=True)
    assert str(caught.value).startswith("task.divergence=true")


def test_vocabularies_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="the vocabularies differ: 5 logits of the full cache, 4 of the policy"):
        token_divergence(torch.zeros(5), torch.zeros(1, 4), 0)


def test_the_tokens_after_a_prompt_are_compared(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three " * 40)
    asked: dict[str, Any] = {
        "tasks": "perplexity",
        "data_dir": str(tmp_path / "text.txt"),
        "length": 64,
        "prompt_tokens": 40,
    }
    (row,) = kvbench.evaluate(tiny_model, policies="knorm", budgets=16, divergence=True, **asked)
    (sample,) = row.samples
    assert sample.divergence is not None
    assert (sample.prompt_tokens, len(sample.divergence.kl), sample.likelihood) == (40, 24, None)

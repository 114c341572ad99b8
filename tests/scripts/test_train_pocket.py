"""The pocket model's tokenizer, its exercises and its training loop."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from pocket_data import BOS, EOS, copying
from pocket_stages import Part, Stage, curriculum, make_batch
from pocket_text import Needles, needles
from pocket_tokenizer import build_tokenizer
from train_pocket import Config, Trainer, export, train
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENIZER = build_tokenizer()
TINY = Config(seed=1, steps=6, tokens=256, warmup=2, decay=2, hidden=16, layers=2, heads=4, kv_heads=2, head=4, mlp=16)
STAGES = (
    Stage("copy", (Part("copy", copying, 32),), gate="copy", target=0.0, at_least=2),
    Stage("copy-64", (Part("copy-64", copying, 64),), gate="copy-64"),
)


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([i]) for i in TOKENIZER.encode(text, add_special_tokens=False).ids]


def predictable(exercise: tuple[list[int], list[bool]]) -> str:
    ids, known = exercise
    return TOKENIZER.decode([i for i, k in zip(ids, known, strict=True) if k], skip_special_tokens=False)


@given(st.text())
@settings(max_examples=100)
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids[0] == BOS
    assert TOKENIZER.decode(ids[1:], skip_special_tokens=False) == text


def test_digits_are_cut_in_groups_of_three_from_the_left() -> None:
    assert pieces("5285656") == ["528", "565", "6"]
    assert pieces("is 12345.") == ["is", " ", "123", "45", "."]


@pytest.mark.parametrize("stage", curriculum()[:9], ids=lambda stage: stage.name)
def test_a_batch_depends_on_stage_seed_and_step_alone(stage: Stage) -> None:
    first, again, other = (make_batch(stage, 5, step, 1024) for step in (3, 3, 4))
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.known, again.known)
    assert first.ids.shape != other.ids.shape or (first.ids != other.ids).any()
    assert first.known.any()


@given(
    st.integers(0, 10**6),
    st.sampled_from(["ruler", "secret"]),
    st.sampled_from(["noise", "story", "needle"]),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_every_answer_about_needles_stands_in_the_context(
    seed: int, frame: str, haystack: str, values: int, together: int
) -> None:
    level = Needles(frame, haystack, count=4, values=values, asked=1, together=together)
    exercise = needles(np.random.default_rng(seed), 700, level)
    text = TOKENIZER.decode(exercise[0])
    context = text[: text.rindex("?")]
    told = predictable(exercise)
    assert exercise[0][-1] == EOS
    numbers = [word.strip(",<eos>") for word in told.split() if word.strip(",<eos>").isdigit()]
    assert len(numbers) == values * together
    for number in numbers:
        assert number in context
    assert 500 < len(exercise[0]) <= 700


def test_a_resumed_training_ends_with_identical_weights(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    trainer = Trainer(TINY, STAGES)
    train(trainer, whole, until=6, save_every=100)
    train(Trainer(TINY, STAGES), parts, until=3, save_every=100)
    resumed = Trainer(TINY, STAGES)
    resumed.load(parts / "checkpoint.pt")
    assert resumed.at.step == 3
    train(resumed, parts, until=6, save_every=100)
    assert resumed.at.stage == trainer.at.stage == 1
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_an_exported_model_loads_with_its_tokenizer_and_the_same_logits(tmp_path: Path) -> None:
    trainer = Trainer(TINY, STAGES)
    export(trainer.model, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("The secret number of able-acorn is 5285656.", return_tensors="pt").input_ids
    assert ids[0].tolist() == TOKENIZER.encode("The secret number of able-acorn is 5285656.").ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, trainer.model(ids).logits, rtol=0, atol=0)

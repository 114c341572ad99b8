"""The exercises of the pocket model and its training loop."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import train_pocket
from train_pocket import LEVELS, Config, Trainer, make_batch, needles, tokenizer

TINY = Config(seed=1, steps=6, tokens=256, warmup=2, decay=2, hidden=16, layers=2)


@pytest.mark.parametrize("level", [0, len(LEVELS) - 2])
def test_a_batch_depends_on_level_seed_and_step_alone(level: int) -> None:
    first, again, other = (make_batch(level, 5, step, 1024) for step in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])
    assert first[1].any()
    assert first[0].shape[1] <= 1.1 * max(one.length for one in LEVELS[: level + 1])


@pytest.mark.parametrize("seed", range(8))
def test_every_predictable_number_is_in_the_context_and_every_answer_ends(seed: int) -> None:
    ids, known = needles(np.random.default_rng(seed), 700)
    context = tokenizer().decode(ids[: known.index(True)])
    answers = tokenizer().decode([i for i, k in zip(ids, known, strict=True) if k]).replace("<eos>", " ")
    numbers = [word for word in answers.replace(",", " ").split() if word.isdigit()]
    assert numbers
    assert all(number in context for number in numbers)
    assert ids[-1] == tokenizer().eos_token_id
    assert 400 < len(ids) <= 760


def test_a_resumed_training_ends_with_identical_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels advance on the way: their targets are below what a random model reaches."""
    easy = tuple(train_pocket.Level(one.name, one.make, one.length, target=0.0) for one in LEVELS[:3])
    monkeypatch.setattr(train_pocket, "LEVELS", easy)
    whole, first, resumed = Trainer(TINY), Trainer(TINY), Trainer(TINY)
    whole.train(tmp_path / "whole.pt", 6)
    first.train(tmp_path / "part.pt", 3)
    resumed.load(tmp_path / "part.pt")
    assert resumed.progress.step == 3
    resumed.train(tmp_path / "part.pt", 6)
    assert whole.progress.level == resumed.progress.level == 2
    assert resumed.model.state_dict().keys() == whole.model.state_dict().keys()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_steps_on_one_batch_teach_its_predictable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_pocket, "make_batch", lambda level, seed, step, tokens: make_batch(0, seed, 0, tokens))
    trainer = Trainer(Config(steps=400, tokens=256, warmup=10, decay=1, hidden=64, layers=2))
    accuracy = [trainer.step() for _ in range(60)]
    assert accuracy[0] < 0.05
    assert accuracy[-1] > 0.9

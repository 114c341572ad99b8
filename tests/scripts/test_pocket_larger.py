"""The larger pocket model: its exercises in token ids, its training step and its clock."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import eval_pocket
import pocket_larger
import pocket_larger_eval
from pocket_data import BOS, EOS, tokenizer
from pocket_families import FAMILIES, LENGTHS, Family, Packed, make_packed
from pocket_fast import Forward, Targets, loss_of, orthogonal, tame
from pocket_ids import Doc, Level, Source, chains, common_words, frequent_words, needles, sums
from pocket_larger import Batches, train
from pocket_larger_course import FORCED, Larger, Standing, climb, shares_of
from pocket_larger_eval import Cell, Plain, ask
from pocket_larger_trainer import LargerTrainer, build, rate_at
from train_pocket import export_larger
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.variable_tracking import VariableTracking

TINY = Larger(device="cpu", minutes=1, tokens=4352, warmup=1, hidden=16, layers=2, heads=4, kv_heads=2, head=8, mlp=16)
WRITTEN = [family for family in FAMILIES if family.name != "copy"]


def text(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


def told(doc: Doc) -> list[str]:
    """The answers, one for each question."""
    return text([doc.ids[place] for place in doc.asked]).split("<eos>")[:-1]


@pytest.mark.parametrize("family", WRITTEN, ids=lambda family: family.name)
def test_the_pieces_joined_are_the_ids_of_the_whole_text(family: Family) -> None:
    source = Source(5)
    for length in LENGTHS[:4]:
        doc = family.make(source, length)
        assert doc.ids[0] == BOS
        assert len(doc.ids) <= 1.02 * length
        for part in text(doc.ids[1:]).split("<eos>"):
            whole = tokenizer().encode(part, add_special_tokens=False).ids
            assert not whole or whole in [list(x) for x in _cut_at_eos(doc.ids[1:])]


def _cut_at_eos(ids: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def test_exercises_read_like_the_tasks_prompts() -> None:
    """Digits, words and names replaced, a task's prompt and the exercise for it have the same lines."""

    def shape(prompt: str) -> set[str]:
        drawn = re.sub(r"\b[A-Z]{3,5}\b(?<!VAR)", "NAME", re.sub(r"\d+", "0", prompt))
        return {re.sub(r"[a-z]+-[a-z]+", "key", line) for line in drawn.split("\n")}

    source, noise = Source(1), Level("ruler", "noise")
    pairs = [
        (RulerNiah(name="niah", length=1024), needles(source, 900, noise)),
        (RulerNiah(name="niah", length=1024, values=4), needles(source, 900, replace(noise, values=4))),
        (
            RulerNiah(name="niah", length=1024, keys=4, queries=4),
            needles(source, 900, replace(noise, count=4, together=4)),
        ),
        (Niah(lengths=(512,), haystack="noise"), needles(source, 400, Level("secret", "noise"))),
        (VariableTracking(length=1024), chains(source, 1000, 4, 1)),
    ]
    for task, doc in pairs:
        example = next(task.examples(Plain(), 0, 1))
        answer = next(i for i in range(len(doc.ids) - 1, 0, -1) if i not in doc.asked) + 1
        asked, written = shape(example.prompt + example.answer_prefix), shape(text(doc.ids[1:answer]))
        if isinstance(task, Niah):  # the haystack is one line there, of another number of sentences
            asked, written = ({line for line in lines if "grass" not in line} for lines in (asked, written))
        assert asked == written, task.name


@given(st.integers(0, 10**6), st.sampled_from(["secret", "ruler"]), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_every_value_told_stands_beside_its_key(seed: int, frame: str, values: int, together: int) -> None:
    together = together if values == 1 else 1
    doc = needles(Source(seed), 900, Level(frame, "story", 4, values, 2, together))
    whole = text(doc.ids)
    questions = re.findall(r"What (?:is|are).*? (?:number|numbers) (?:of|for) (.*?)(?: mentioned.*)?\?", whole)
    assert len(questions) == len(told(doc)) == 2
    for question, answer in zip(questions, told(doc), strict=True):
        keys, numbers = re.findall(r"\w+-\w+", question), re.findall(r"\d{7}", answer)
        found = [re.findall(rf"\b{key} is:? (\d{{7}})\.", whole) for key in keys]
        assert sorted(numbers) == sorted(number for each in found for number in each)
        if together > 1:
            assert [[number] for number in numbers] == found


def test_any_value_that_is_left_is_right() -> None:
    doc = Doc([BOS])
    doc.tell_any([(10, 11, 12), (10, 13, 14), (20, 21, 22)], lambda i: (9,) if i else ())
    assert doc.ids == [BOS, 10, 11, 12, 9, 10, 13, 14, 9, 20, 21, 22]
    assert doc.options == [(1, (10, 20)), (2, (11, 13)), (5, (10, 20))]
    assert doc.asked == list(range(1, 12))


def test_names_are_told_along_their_chain() -> None:
    doc = chains(Source(3), 1000, 4, 1)
    whole = text(doc.ids)
    names = re.findall(r"VAR ([A-Z]{5}) =", whole)
    assert len(names) == 5
    assert whole.endswith("they are: " + " ".join(names) + "<eos>")
    assert told(doc)[0].endswith(" ".join(names))


def test_common_words_are_the_most_frequent_ones() -> None:
    doc = common_words(Source(2), 1500, 10, 6, 1)
    listed = text(doc.ids).split("ones that appear most often.\n")[-1].split("\nQuestion")[0]
    words = Counter(re.findall(r"\d+\. (\w+)", listed))
    answer = told(doc)[-1].rsplit(": ", 1)[-1]
    assert [words[word] for word in re.findall(r"\d+\. (\w+)", answer)[-10:]] == [6] * 10
    assert sorted(words.values())[-11] == 1


def test_frequent_words_are_the_second_to_fourth() -> None:
    doc = frequent_words(Source(2), 1500)
    words = Counter(
        re.findall(r" (\.\.\.|[a-z]{6})\b|\Z", text(doc.ids).split("coded words.")[1].split("\nQuestion")[0])
    )
    del words[""]
    ranked = [word for word, _ in words.most_common() if "." not in word]
    assert told(doc)[0].split() == ranked[:3]


def test_sums_and_differences_are_right() -> None:
    doc = sums(Source(4), 700, 6, 5, "story")
    whole = text(doc.ids)
    asked = re.findall(r"What is the count of (\w+) (\w+) the count of (\w+)\?", whole)
    assert len(asked) == 5
    for (first, sign, second), answer in zip(asked, told(doc), strict=True):
        a, b = (int(re.findall(rf"The count of {noun} is (\d+)\.", whole)[0]) for noun in (first, second))
        assert answer == (f" {a} + {b} = {a + b}" if sign == "plus" else f" {a} - {b} = {a - b}")


def test_a_batch_depends_on_its_arguments_alone_and_marks_the_tokens_before_its_targets() -> None:
    shares = np.ones(len(FAMILIES))
    first, again, other = (make_packed(7, number, 1, shares, 4352) for number in (3, 3, 4))
    for name in ("ids", "place", "target", "weight", "family", "option"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert (first.ids != other.ids).any()
    np.testing.assert_array_equal(first.ids.reshape(-1)[first.place + 1], first.target)
    assert set(first.target[first.option_of]) & set(first.option)


def batch(number: int = 0) -> Packed:
    return make_packed(1, number, 0, np.ones(len(FAMILIES)), TINY.tokens)


def test_the_lean_forward_pass_is_that_of_the_llama() -> None:
    model = build(TINY)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(3, 5000, (3, 40))
    expected = model.model(input_ids=ids).last_hidden_state.reshape(-1, TINY.hidden)
    torch.testing.assert_close(Forward(model, torch.float32, compiled=False)(ids), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_log_of_all_the_probability_on_what_is_right() -> None:
    head = torch.eye(4)
    hidden = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
    index = torch.tensor
    targets = Targets(
        place=index([0, 1]),
        target=index([2, 3]),
        weight=index([3.0, 1.0]),
        family=index([0, 0]),
        option_of=index([0, 0]),
        option=index([2, 3]),
    )
    loss, met = loss_of(hidden, head, targets)
    expected = -(3 * np.log(0.7) + np.log(0.1)) / 4  # by hand: 0.3 + 0.4 is right at the first place, 0.1 at the second
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert met.tolist() == [1.0, 0.0]


def test_an_orthogonal_update_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 24, 10)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    a, b = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    a.grad, b.grad = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 2.0, 2.0])
    tame([a, b])
    assert not a.grad.any()
    assert not b.grad.any()
    b.grad = torch.tensor([0.0, 6.0, 8.0])
    assert tame([b]).item() == pytest.approx(10.0)
    torch.testing.assert_close(b.grad, torch.tensor([0.0, 0.6, 0.8]))


def test_training_lowers_the_loss_on_a_batch_it_repeats() -> None:
    trainer = LargerTrainer(replace(TINY, rate=0.02))
    losses = []
    for _ in range(12):
        trainer.step(batch(), 0.0)
        losses.append(trainer.read())
    assert losses[0] > 8
    assert losses[-1] < losses[0] - 2


def test_a_resumed_training_ends_with_identical_weights(tmp_path: Path) -> None:
    whole, first, second = (LargerTrainer(TINY) for _ in range(3))
    for number in range(4):
        whole.step(batch(number), 0.1)
    for number in range(2):
        first.step(batch(number), 0.1)
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    for number in range(2, 4):
        second.step(batch(number), 0.1)
    assert second.at.step == whole.at.step == 4
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_a_training_ends_with_its_clock_and_has_told_and_saved_where_it_stands(tmp_path: Path) -> None:
    config = replace(TINY, minutes=0.02, workers=1)
    trainer, batches = LargerTrainer(config), Batches(config, 0, shares_of(Standing(), 0.0))
    try:
        train(trainer, batches, tmp_path, until=1.2, every=1)
    finally:
        batches.close()
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == list(range(1, trainer.at.step + 1))
    assert trainer.at.seconds >= 1.2
    assert curve[-1]["tokens"] == trainer.at.tokens == 4352 * trainer.at.step
    assert min(trainer.at.reached) >= 1  # the clock has brought every family on
    again = LargerTrainer(config)
    again.load(tmp_path / "checkpoint.pt")
    assert again.at == trainer.at


def test_a_training_in_pieces_goes_on_from_its_checkpoint_until_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pocket_larger, "_config", lambda args: replace(TINY, minutes=args.minutes, workers=1))
    monkeypatch.setattr(pocket_larger, "CLOSING", 0.0)
    asked = {"piece": 1.0, "minutes": 1.5 / 60, "tokens": 4352, "eval_limit": 0, "out": tmp_path, "export": None}
    finished: list[Path] = []
    codes, steps = [], [0]
    for piece in range(30):  # of a step at least, however busy the machine is
        arguments = argparse.Namespace(**asked, resume=piece > 0)
        codes.append(pocket_larger.run(arguments, lambda model, folder: finished.append(folder)))
        steps.append(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["at"]["step"])
        if codes[-1] == 0:
            break
        assert finished == []
        assert (tmp_path / "travelling.pt").exists(), "what another machine goes on from"
    assert codes[0] == 75
    assert codes[-1] == 0
    assert finished == [tmp_path / "model"]
    assert steps == sorted(steps)
    assert 0 < steps[1] < steps[-1], "what a piece has trained is not trained again"
    assert pocket_larger._seconds(tmp_path / "checkpoint.pt") >= 1.5
    assert not (tmp_path / "travelling.pt").exists()


def test_a_checkpoint_that_travels_is_smaller_and_the_same_but_for_rounded_momenta(tmp_path: Path) -> None:
    trainer, other = LargerTrainer(TINY), LargerTrainer(replace(TINY, seed=5))
    for number in range(2):
        trainer.step(batch(number), 0.1)
    trainer.save(tmp_path / "exact.pt")
    trainer.save(tmp_path / "rounded.pt", rounded=True)
    assert (tmp_path / "rounded.pt").stat().st_size < 0.8 * (tmp_path / "exact.pt").stat().st_size
    other.load(tmp_path / "rounded.pt")
    for mine, theirs in zip(other.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(other.muon.buffers, trainer.muon.buffers, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=0)
    for p, q in zip(other.others, trainer.others, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = other.adam.state[p][name], trainer.adam.state[q][name]
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=1e-38)
    assert other.at == trainer.at


def test_an_evaluation_that_ran_out_of_time_goes_on_with_the_cells_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_larger(build(TINY), tmp_path / "model")
    cells = [cell for which in (0, 2) if (cell := ask(512, which, 1)) is not None]
    told: list[str] = []

    def counting(model: object, cell: Cell) -> list[str]:
        told.append(cell.task.name)
        return ["no number"] * len(cell.rows)

    monkeypatch.setattr(pocket_larger_eval, "answers", counting)
    out = tmp_path / "eval.json"
    assert not pocket_larger_eval.evaluate(tmp_path / "model", cells, out, "cpu", seconds=-1.0)
    assert told == []
    assert pocket_larger_eval.evaluate(tmp_path / "model", cells[:1], out, "cpu", seconds=60.0)
    assert pocket_larger_eval.evaluate(tmp_path / "model", cells, out, "cpu", seconds=60.0)
    assert told == ["niah", "niah_multikey"], "each once"
    assert json.loads(out.read_text())["scores"] == {"niah": {"512": 0.0}, "niah_multikey": {"512": 0.0}}


def test_an_export_reads_prompts_as_both_evaluations_do(tmp_path: Path) -> None:
    """Right after training rows of ids are padded together; `eval_pocket.py` asks through transformers, one by one."""
    model = build(TINY)
    export_larger(model, tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert reloaded.num_parameters() == model.num_parameters()
    cell = ask(512, 0, 2)
    assert cell is not None
    read = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [example.prompt + example.answer_prefix for example in cell.examples]
    assert [read(prompt).input_ids for prompt in prompts] == cell.rows
    together = list(pocket_larger_eval.answers(reloaded, cell))
    alone = [eval_pocket.answer(reloaded, read, example) for example in cell.examples]
    for text_, other in zip(together, alone, strict=True):
        assert text_[:20] == other[:20]
        assert text_


def test_the_rate_follows_the_clock_to_zero() -> None:
    config = replace(TINY, rate=1.0, warmup=10, decay=0.3)
    assert rate_at(config, 4, 0.0) == pytest.approx(0.5)
    assert rate_at(config, 500, 0.69) == pytest.approx(1.0)
    assert rate_at(config, 500, 0.85) == pytest.approx(0.5)
    assert rate_at(config, 500, 1.0) == rate_at(config, 500, 1.2) == 0.0


def test_a_family_climbs_when_it_answers_or_its_time_has_come_and_what_is_learnt_gets_less() -> None:
    at = Standing()
    at.met[1][0], at.since[1] = 0.99, 5
    climb(at, 0.0)
    assert at.reached == [0, 1, *[0] * (len(FAMILIES) - 2)]
    climb(at, FORCED[2])
    climb(at, FORCED[2])
    assert min(at.reached) == 2
    shares = shares_of(at, 0.5)
    assert shares[1].argmax() == 1
    assert shares[2].argmax() == 0
    assert shares[1].sum() < shares[2].sum()
    assert (shares[:, 3:] == 0).all()


def test_questions_of_the_evaluation_come_from_the_tasks() -> None:
    cell = ask(512, 0, 3)
    assert cell is not None
    assert len(cell.rows) == 3
    assert all(row[0] == BOS and len(row) <= 513 for row in cell.rows)
    assert ask(512, 10, 1) is None  # variable tracking has no prompt of 512 tokens

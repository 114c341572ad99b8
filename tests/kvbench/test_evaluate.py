"""`kvbench.evaluate`: what the command line computes, from Python, for names and for objects."""

import gc
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shown_tables import shown_rows
from small_cells import samples
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import kvbench
from kvbench.cli import main
from kvbench.engine import compute as engine
from kvbench.models import given
from kvbench.models.given import borrowed
from kvbench.policies.observation import Observation, State
from kvbench.report.html.prompts import prompts_of
from kvbench.tasks.niah import Niah

SMALL: dict[str, Any] = {"tasks": "niah", "lengths": [300], "depths": [0.0, 0.5], "repeats": 1, "max_new_tokens": 3}
TYPED = ("task=niah", "task.lengths=[300]", "task.depths=[0.0,0.5]", "task.repeats=1", "task.max_new_tokens=3")
Objects = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@dataclass(frozen=True)
class Oldest(kvbench.Scorer):
    """Keeps the first tokens."""

    def score(self, observation: Observation, state: State) -> Tensor:
        return -observation.positions.float()


@pytest.fixture
def objects(tiny_model: Path) -> Objects:
    """The tiny model as a program has it."""
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def outputs(results: kvbench.Results) -> list[list[str | None]]:
    return [[sample.output for sample in result.samples] for result in results]


def test_its_runs_are_those_of_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    asked = ["-m", f"model={tiny_model}", "policy=full,snapkv", "budget=40,50", "seed=3", "schedule=blocks"]
    assert main([*asked, "device=cpu", f"out={tmp_path}/typed", *TYPED]) == 0
    chosen: dict[str, Any] = {"policies": ["full", "snapkv"], "budgets": [40, 50], "seed": 3}
    chosen |= {"schedule": "blocks", "device": "cpu"}
    results = kvbench.evaluate(tiny_model, **chosen, out=tmp_path / "called", **SMALL)
    assert samples(tmp_path / "called") == samples(tmp_path / "typed")
    assert sorted(result.run_id for result in results) == sorted(samples(tmp_path / "typed"))
    assert len(results) == 3  # full once


def test_a_policy_of_one_s_own_runs_and_is_audited(tiny_model: Path) -> None:
    (result,) = kvbench.evaluate(tiny_model, policies=kvbench.Policy(Oldest(), budget=24, name="oldest"), **SMALL)
    assert result.run_id.startswith("tiny0-oldest-24-niah-")
    assert result.kept_tokens == 24


def test_a_task_object_is_the_run_of_its_name(tiny_model: Path) -> None:
    fields = {k: v for k, v in SMALL.items() if k != "tasks"}
    task = replace(Niah(lengths=(300,), depths=(0.0, 0.5), repeats=1), max_new_tokens=3)
    chosen: dict[str, Any] = {"policies": "full", "limit": 1}
    (named,) = kvbench.evaluate(tiny_model, **chosen, tasks="niah", **fields)
    (called,) = kvbench.evaluate(tiny_model, **chosen, tasks=task)
    assert called.run_id == named.run_id


def test_a_model_object_answers_as_its_folder_does_and_is_left_as_it_was(objects: Objects, tiny_model: Path) -> None:
    model, tokenizer = objects
    model.train()
    chosen: dict[str, Any] = {"policies": ["full", "knorm"], "budgets": 40, **SMALL}
    called = kvbench.evaluate(model, tokenizer, **chosen)
    assert outputs(called) == outputs(kvbench.evaluate(tiny_model, device="cpu", **chosen))
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)
    assert [result.run_id[:5] for result in called] == ["tiny0", "tiny0"]
    assert "the model was an object in Python" in prompts_of(called[0], 1).reason


def test_a_model_on_disk_is_the_model_in_memory(objects: Objects, tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = objects
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(tiny_model, device_map=places, offload_folder=tmp_path)
    assert any(one.is_meta for one in offloaded.parameters())
    chosen: dict[str, Any] = {"policies": ["full", "knorm"], "budgets": 40, **SMALL}
    called = kvbench.evaluate(offloaded, tokenizer, **chosen)
    expected = kvbench.evaluate(model, tokenizer, **chosen)
    assert outputs(called) == outputs(expected)
    assert [row.run_id for row in called] == [row.run_id for row in expected]
    empty = AutoModelForCausalLM.from_config(model.config).to("meta")
    for call in (
        lambda: kvbench.evaluate(empty, tokenizer, **chosen),
        lambda: kvbench.generate(empty, torch.tensor([[3]]), kvbench.make_policy("full")),
    ):
        with pytest.raises(ValueError, match=r"^the model has no weights: model\.embed_tokens\.weight is on the"):
            call()


def test_a_checksum_counts_every_word_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([[7, -2], [3, 11]])
    assert given.checksum(numbers) == 7 * 1 - 2 * 3 + 3 * 5 + 11 * 7
    assert given.checksum(numbers.flip(0)) == 3 * 1 + 11 * 3 + 7 * 5 - 2 * 7
    assert given.checksum(torch.tensor([-1])) == 2**64 - 1
    assert given.checksum(torch.tensor([1.0])) == 0x3F800000  # the bits of a float32, padded to a word
    assert given.checksum(torch.tensor([0, 9, 0, 5], dtype=torch.int32)[1:]) == 9 + 3 * 5
    monkeypatch.setattr(given, "_WORDS", 3)
    assert given.checksum(numbers) == 93


def test_a_run_is_continued_and_a_finished_one_is_not_computed_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, Any] = {"policies": "tova", "budgets": 40, "out": tmp_path, **SMALL}
    (first,) = kvbench.evaluate(tiny_model, limit=1, **chosen)
    written = (first.folder / "samples.jsonl").read_bytes()
    (whole,) = kvbench.evaluate(tiny_model, **chosen)
    assert whole.folder == first.folder
    assert (whole.folder / "samples.jsonl").read_bytes().startswith(written)
    assert len(whole.samples) == 2
    monkeypatch.setattr(engine, "load", None)
    assert outputs(kvbench.evaluate(tiny_model, **chosen)) == outputs([whole])
    (part,) = kvbench.evaluate(tiny_model, limit=1, **chosen)
    assert len(part.samples) == 1


def test_without_a_folder_nothing_is_written(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    results = kvbench.evaluate(tiny_model, policies="full", limit=1, **SMALL)
    assert results[0].folder.is_dir()  # its report is made of it
    del results
    gc.collect()
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "temporary").iterdir()]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"policies": "snapk"}, "policy=snapk does not exist"),
    "policies": ({"policies": [7]}, "policies must be a name or a Policy, got an int"),
    "budget": ({"budgets": 0}, "budget"),
    "budget alone": ({"budget": 4}, "budget= is not allowed, write budgets="),
    "task": ({"tasks": "nia"}, "task=nia does not exist"),
    "model": ({"model": "pockt"}, "model=pockt does not exist"),
    "compress": ({"compress": "all"}, "compress"),
    "dtype": ({"dtype": "int4"}, "dtype=int4 does not exist"),
    "field": ({"max_tokens": 3}, "task.max_tokens=3 is not a field of Niah"),
    "object": ({"model": torch.nn.Linear(1, 1)}, "model= must be a name or a model of transformers, got a Linear"),
    "tokenizer": ({"tokenizer": "mine"}, "tokenizer= is for a model object"),
    "two schedules": (
        {"policies": [kvbench.make_policy("snapkv", 40)], "schedule": "blocks"},
        "schedule, block, decode, every and protect are not allowed with a Policy",
    ),
    "two tasks": ({"tasks": Niah(), "max_new_tokens": 3}, "max_new_tokens: fields of a task are not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_sentence(name: str, tiny_model: Path) -> None:
    wrong, said = WRONG[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is looked at below
        kvbench.evaluate(**{"model": tiny_model, "policies": "snapkv", **wrong})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_class_that_cannot_be_imported_again_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Local(Oldest):
        """In a function."""

    for scorer, said in ((Local(), "is defined inside a function"), (Oldest(), "has no file")):
        monkeypatch.delattr(sys.modules[__name__], "__file__", raising=False)  # as in a notebook
        policy = kvbench.Policy(scorer, budget=24)
        with pytest.raises(ValueError, match=said):
            kvbench.evaluate(tiny_model, policies=policy, out=tmp_path, **SMALL)


def test_generate_equals_transformers_generate_with_the_same_cache(objects: Objects) -> None:
    model, tokenizer = objects
    text, policy = "The cat sits on the roof until the water falls. " * 2, kvbench.make_policy("snapkv", 40)
    done = kvbench.generate(model, text, policy, tokenizer=tokenizer, max_new_tokens=6)
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert kvbench.generate(model, ids, policy, max_new_tokens=6).tokens == done.tokens
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("kvbench")
    cache = kvbench.KVCache(model.config, policy)
    written = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert done.tokens == [written[0, ids.shape[1] :].tolist()]


def test_a_generation_config_does_not_change_answers_and_is_named_and_recorded(
    objects: Objects, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model's own loop these fields change the tokens: `model.generate` with a KVCache uses them."""
    model, tokenizer = objects
    ids = tokenizer("one two three four " * 10, return_tensors="pt").input_ids
    plain = kvbench.generate(model, ids, kvbench.make_policy("full"), max_new_tokens=12).tokens[0]
    expected = kvbench.evaluate(model, tokenizer, policies="full", **SMALL)
    changed = {"repetition_penalty": 1.7, "suppress_tokens": plain[:1], "min_new_tokens": 0, "num_beams": 1}
    model.generation_config.update(**changed, forced_bos_token_id=1, sequence_bias={(plain[1],): -9.0})
    with borrowed(model):
        cache = kvbench.KVCache(model.config, kvbench.make_policy("full"))
        theirs = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert theirs[0, ids.shape[1] :].tolist() != plain
    assert kvbench.generate(model, ids, kvbench.make_policy("full"), max_new_tokens=12).tokens[0] == plain
    by_object = kvbench.evaluate(model, tokenizer, policies="full", out=tmp_path / "a", **SMALL)
    model.generation_config.update(sequence_bias=None)
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.generation_config.save_pretrained(tmp_path)
    by_name = kvbench.evaluate(tmp_path, policies="full", out=tmp_path / "b", **SMALL)
    assert outputs(by_object) == outputs(by_name) == outputs(expected)
    said = [record.message for record in caplog.records if "generation config" in record.message]
    start = f"the model's generation config sets repetition_penalty=1.7, suppress_tokens=[{plain[0]}]"
    assert len(said) == 2
    assert all(text.startswith(start) for text in said)
    for results in (by_object, by_name):
        environment = json.loads((results[0].folder / "environment.json").read_text())
        found = environment["model"]["generation_config_unused"]
        assert found["repetition_penalty"] == 1.7
        assert set(found) - {"sequence_bias"} == {"repetition_penalty", "suppress_tokens", "forced_bos_token_id"}


def test_results_are_rows_a_frame_a_table_and_a_page(tiny_model: Path, tmp_path: Path) -> None:
    results = kvbench.evaluate(tiny_model, policies="tova,full", budgets=40, **SMALL)
    assert [row.policy for row in results] == ["tova", "full"]  # as asked
    assert results[0].baseline.run_id == results[1].run_id
    assert [*results.to_pandas()["n"]] == [2, 2]
    assert shown_rows(repr(results))[0][0] == "tova"
    assert "<table" in results._repr_mimebundle_()["text/html"]
    assert [*results.table()["policy"]] == ["tova", "full"]
    assert [*results.pivot("task").columns][-1] == "niah"
    assert shown_rows(repr(results[:1]))[0][0] == "tova"
    assert len(repr(results[:1][0])) < 200, "a notebook shows a result in one line"
    assert "tova" in results.report(tmp_path / "report.html").read_text()
    with pytest.raises(ValueError, match=r"report\.txt must end in \.html"):
        results.report(tmp_path / "report.txt")

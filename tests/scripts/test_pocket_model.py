"""The pocket model as it is shipped."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.tasks.niah import Niah
from kvbench.tasks.task import Example, PlainTokenizer, Task

FOLDER = Path(str(files("kvbench"))) / "pocket"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, example: Example, prompt: str
) -> float:
    inputs = tokenizer(prompt + example.answer_prefix, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=example.max_new_tokens, do_sample=False)
    return task.score(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True), example)


def test_the_tokenizer_cuts_digits_by_three_and_any_text_survives_a_round_trip(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("5285656", add_special_tokens=False)]
    assert pieces == ["528", "565", "6"]
    text = "One of the special magic numbers for able-acorn is: 5285656.\nVAR DMNOI = VAR QXZRT \u6f22\u5b57 \u00fcber"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_a_needle_is_found_at_every_depth_and_only_because_it_is_there(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    task = Niah(lengths=(1024,), repeats=1)
    examples = list(task.examples(PlainTokenizer(tokenizer), seed=7))
    assert len(examples) == 10
    scores = [score(model, tokenizer, task, example, example.prompt) for example in examples]
    assert sum(scores) >= 9
    number = examples[5].references[0]
    without = examples[5].prompt.replace(number, "1234567")
    assert score(model, tokenizer, task, examples[5], without) == 0

"""Tasks whose tokens are given, from the command line to the samples, on the tiny model and on real texts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_cells import only
from transformers import AutoModelForCausalLM, AutoTokenizer

READ = ("task=perplexity", "task.data_dir=texts", "task.length=200")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(here: Command) -> Command:
    """Run a command line on the tiny model in a folder that has the folder `texts`."""
    for name, length in (("a", 180), ("b", 90), ("c", 300)):
        write(f"texts/{name}.txt", words(length))
    return here


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def words(length: int) -> str:
    """Text of so many bytes, which are tokens here, without much repetition."""
    return " ".join(f"{n * 7919 % 1000:03d}" for n in range(length))[:length]


def plain(folder: Path, text: str, length: int) -> list[float]:
    """-log p of tokens 1.. of a text by an ordinary forward pass."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(text)[:length]])
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.inference_mode():
        rows = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, :-1].log_softmax(-1)
    return (-rows.gather(-1, ids[0, 1:, None])[:, 0]).tolist()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_perplexity_under_full_is_that_of_an_ordinary_forward_pass(command: Command, tiny_model: Path) -> None:
    code, out, _ = command("policy=full", *READ)
    assert code == 0
    assert "NLL: nats per token, lower is better" in out
    for line, name, tokens in zip(only(Path("results/runs")), ("a", "b", "c"), (181, 91, 200), strict=True):
        nll = plain(tiny_model, Path(f"texts/{name}.txt").read_text(), 200)
        got = line["likelihood"]
        assert (line["prompt_tokens"], got["tokens"]) == (tokens, tokens - 1)  # BOS included; the longest is cut
        assert got["nll"] == pytest.approx(mean(nll), abs=1e-4)
        assert got["lengths"] == [n for n in (2, 4, 8, 16, 32, 64, 128) if n <= tokens] + [tokens]
        assert got["cumulative"] == pytest.approx([mean(nll[: n - 1]) for n in got["lengths"]], abs=1e-4)
        assert line["metadata"] == {"task": "perplexity", "text": f"{name}.txt"}
        assert (line["output"], line["score"], line["generated_tokens"], got["block"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["policy=sirllm", "task.block=8"], "block=8: sirllm needs the whole prompt"),
        (
            ["policy=full", "generation.temperature=0.6", "generation.samples=4"],
            "generation.temperature=0.6 has no effect: task perplexity scores tokens that are given, leave it out",
        ),
        (["policy=full", "task.length=2000", "task.data_dir=long"], "the model's maximum is 1024"),
        (["policy=full", "task.prompt_tokens=200"], "prompt_tokens=200 leaves no token to score of length=200"),
        (["policy=full", "task.data_dir=short"], "empty.txt contains only white space, remove it from data_dir=short"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(command: Command, arguments: list[str], sentence: str) -> None:
    write("short/empty.txt", "")
    write("long/a.txt", words(1500))
    code, _, err = command("budget=32", *READ, *arguments)
    assert code == 1
    assert sentence in err
    assert "Traceback" not in err

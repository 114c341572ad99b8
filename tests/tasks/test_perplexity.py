"""Texts that are given: which ones, in which order, and what is said of files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from kvbench.tasks.hub import HubFile, HubFolder
from kvbench.tasks.perplexity import Perplexity, Summaries
from kvbench.tasks.task import Example, Reading, Tokenizer


def read(tokenizer: Tokenizer, data_dir: Path | str, limit: int | None = None, **fields: object) -> list[Example]:
    return list(Perplexity(data_dir=str(data_dir), **fields).examples(tokenizer, 0, limit))  # type: ignore[arg-type]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_is_read_file_by_file_in_the_order_of_the_paths(pieces: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a.txt", "first\r\nof all")
    write(tmp_path / "c.jsonl", '{"text": "third", "n": 1}\n\n{"text": "fourth"}\n')
    pd.DataFrame({"text": ["fifth"]}).to_parquet(tmp_path / "d.parquet")
    write(tmp_path / "notes.md", "not a text")
    examples = read(pieces, tmp_path)
    assert [e.prompt for e in examples] == ["first\nof all", "second", "third", "fourth", "fifth"]
    assert [e.metadata["text"] for e in examples] == ["a.txt", "b.txt", "c.jsonl:1", "c.jsonl:2", "d.parquet:1"]
    assert [e.index for e in examples] == [0, 1, 2, 3, 4]
    assert {e.max_new_tokens for e in examples} == {0}


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl", "one.csv", "one.parquet"])
def test_one_file_will_do(pieces: Tokenizer, tmp_path: Path, name: str) -> None:
    text = 'It "rained",\nall day. ' * 10_000  # beyond the 131,072 characters that csv takes for a field unasked
    table = pd.DataFrame({"id": [7], "chapter": [text]})
    {
        "one.txt": lambda path: path.write_text(text),
        "one.jsonl": lambda path: path.write_text(json.dumps({"id": 7, "chapter": text})),
        "one.csv": lambda path: table.to_csv(path, index=False),
        "one.parquet": lambda path: table.to_parquet(path),
    }[name](tmp_path / name)
    (example,) = read(pieces, tmp_path / name, field="chapter")
    assert example.prompt == text


def test_pg19_is_read_in_deepminds_layout_and_in_that_of_the_hub(pieces: Tokenizer, tmp_path: Path) -> None:
    patterns = ("test/*.txt", "data/test-*.parquet")
    write(tmp_path / "deepmind" / "test" / "10146.txt", "a book")
    write(tmp_path / "deepmind" / "train" / "1.txt", "not asked for")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pd.DataFrame({"text": ["a book"]}).to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    pd.DataFrame({"text": ["not asked for"]}).to_parquet(tmp_path / "hub" / "data" / "train-0.parquet")
    for layout in ("deepmind", "hub"):
        assert [e.prompt for e in read(pieces, tmp_path / layout, files=patterns)] == ["a book"]


def test_how_it_is_read_is_part_of_every_example(pieces: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a text")
    (example,) = read(pieces, tmp_path, length=None, prompt_tokens=3, block=16)
    assert example.reading == Reading(tokens=None, prompt_tokens=3, block=16)
    (example,) = read(pieces, tmp_path)
    assert example.reading == Reading(tokens=4096)


def test_fewer_texts_are_the_first_ones(pieces: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "".join(json.dumps({"text": f"text {n} " * n}) + "\n" for n in range(1, 6)))
    whole = read(pieces, tmp_path)
    assert read(pieces, tmp_path, texts=3) == whole[:3]
    assert read(pieces, tmp_path, limit=2, texts=3) == whole[:2]
    counts = [len(pieces.encode(e.prompt)) for e in whole]
    assert [e.prompt for e in read(pieces, tmp_path, min_tokens=counts[2])] == [e.prompt for e in whole[2:]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"text": "whole"}\n{"text": "cut o', r"a\.jsonl, line 2: not JSON, the file is damaged or cut off"),
        (b'{"text": "whole"}\n{"body": "x", "id": 1}\n', r"a\.jsonl, row 2: no text in its field 'text', .* body, id"),
        (b'{"text": null}\n', r"a\.jsonl, row 1: no text in its field 'text'"),
        (b'["text"]\n', r"a\.jsonl, line 1: not a JSON object"),
        (b'{"text": "caf\xe9"}\n', r"a\.jsonl is not UTF-8 text"),
    ],
)
def test_a_damaged_jsonl_file_is_named_with_its_line(
    pieces: Tokenizer, tmp_path: Path, content: bytes, sentence: str
) -> None:
    write(tmp_path / "a.jsonl", content)
    with pytest.raises(ValueError, match=sentence):
        read(pieces, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.parquet", b"PAR1 and nothing", r"a\.parquet is damaged or not a parquet file"),
        ("a.csv", b'text\n"cut o', r"a\.csv, line 1: not CSV, the file is damaged or cut off"),
        ("a.csv", b"title\nno text\n", r"a\.csv, row 1: no text in its field 'text', its fields are title"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text"),
        ("a.pdf", b"%PDF", r"a\.pdf is not a text file that is read here, it must be a \.txt"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    pieces: Tokenizer, tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=sentence):
        read(pieces, path)


def test_nothing_to_read_is_said_in_one_sentence(pieces: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "notes.md", "not a text")
    with pytest.raises(ValueError, match=r"holds no text, it must have files such as \*\.txt, \*\.jsonl, \*\.parquet"):
        read(pieces, tmp_path)
    with pytest.raises(ValueError, match="missing does not exist, it must be a folder of texts or one"):
        read(pieces, tmp_path / "missing")


def test_without_network_or_copy_it_says_what_to_download(pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **fields: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    book = Perplexity(source=HubFile("a/books", "main", "data/test.parquet"))
    with pytest.raises(ValueError, match=r"a/books/resolve/main/data/test\.parquet cannot be downloaded .*data_dir="):
        next(book.examples(pieces, 0))
    chapter = Summaries(source=HubFolder("a/chapters", "main"))
    with pytest.raises(ValueError, match=r"a/chapters/resolve/main/test\.csv cannot be downloaded .* test\.csv>"):
        next(chapter.examples(pieces, 0))


def test_a_summary_follows_its_chapter(pieces: Tokenizer, tmp_path: Path) -> None:
    write(
        tmp_path / "dev.csv", 'bid,chapter,summary_text\n1," It rained,\nand rained. "," It was wet. "\n2,Sun.,Dry.\n'
    )
    task = Summaries(data_dir=str(tmp_path), split="dev", frame="{chapter}\n\nIn short:\n", block=64)
    first, second = task.examples(pieces, 0)
    assert first.prompt == "It rained,\nand rained.\n\nIn short:\n"
    assert (first.target, first.references) == ("It was wet.", ("It was wet.",))
    assert first.max_new_tokens == len(pieces.encode("It was wet."))
    assert (second.target, second.reading) == ("Dry.", Reading(block=64))
    assert list(task.examples(pieces, 0, limit=1)) == [first]


def test_booksum_elsewhere_is_said_with_where_it_is(pieces: Tokenizer, tmp_path: Path) -> None:
    task = Summaries(data_dir=str(tmp_path), source=HubFolder("a/chapters", "main"))
    with pytest.raises(ValueError, match=r"has no test\.csv: download https://.*a/chapters/resolve/main/test\.csv and"):
        next(task.examples(pieces, 0))
    with pytest.raises(ValueError, match="does not have the slots"):
        Summaries(frame="no slot")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"length": 1}, "length=1 is not allowed, it must be an integer of at least 2"),
        ({"length": 2.5}, r"length=2\.5 is not allowed"),
        ({"texts": 0}, "texts=0 is not allowed"),
        ({"block": True}, "block=true is not allowed"),
        ({"min_tokens": 0}, "min_tokens=0 is not allowed"),
        ({"length": 10, "prompt_tokens": 10}, "prompt_tokens=10 leaves no token to score of length=10"),
        ({"files": ()}, "it must be a list of patterns"),
    ],
)
def test_a_wrong_field_is_refused_in_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Perplexity(**fields)  # type: ignore[arg-type]


def test_there_is_no_score_for_an_output(pieces: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a text")
    (example,) = read(pieces, tmp_path)
    with pytest.raises(ValueError, match="scores tokens that are given"):
        Perplexity().score("", example)

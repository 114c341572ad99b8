"""Texts that are given: which ones, in which order, and what is said of files that cannot be read."""

from pathlib import Path

import pandas as pd
import pytest

from kvbench.tasks.hub import HubFile, HubFolder
from kvbench.tasks.perplexity import Perplexity, Summaries
from kvbench.tasks.task import Example, Reading, Tokenizer


def read(tokenizer: Tokenizer, data_dir: Path | str, limit: int | None = None, **fields: object) -> list[Example]:
    return list(Perplexity(data_dir=str(data_dir), **fields).examples(tokenizer, 0, limit))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


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


def test_without_network_the_message_names_the_download(pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
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

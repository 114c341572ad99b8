"""Rows and texts from files as they lie about: what is read in which form, and what is said of what cannot be read."""

import gzip
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from kvbench.tasks.text_files import Row, rows, texts

LONG = 'It "rained",\nall day. ' * 10_000  # beyond the 131,072 characters that csv takes for a field unasked
ROWS = [{"text": LONG, "n": "1"}, {"text": "one\u2028two\x85three", "n": "2"}]
LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def zipped(path: Path, member: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/rows.jsonl", '{"text": "not asked for"}')
        archive.writestr(member, LINES)


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_text(LINES, encoding="utf-8"),
    "rows": lambda path: path.write_text(LINES, encoding="utf-8-sig"),
    "lines.json": lambda path: path.write_text(LINES, encoding="utf-8"),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "rows.csv": lambda path: pd.DataFrame(ROWS).to_csv(path, index=False),
    "rows.parquet": lambda path: pd.DataFrame(ROWS).to_parquet(path),
    "rows.zip": lambda path: zipped(path, "a/test.jsonl"),
}


def read(path: Path, lists: Sequence[str] = ()) -> list[Row]:
    return list(rows(path, path.name, ("text",), lists))


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_the_same_in_every_form(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert [{key: str(value) for key, value in row.items()} for row in read(tmp_path / name)] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "a.jsonl",
            b'{"text": "whole"}\n{"text": "cut o',
            r"a\.jsonl, row 2: the file is damaged or truncated \(Untermi",
        ),
        ("a.jsonl", b'{"text": ""}\n{"body": "", "n": 1}', r"a\.jsonl, row 2: no text in its field 'text', .* body, n"),
        ("a.jsonl", b'{"text": "caf\xe9"}', r"a\.jsonl, row 1: the file is damaged or truncated \('utf-8' codec"),
        ("a.jsonl", b"\n", r"a\.jsonl contains no rows"),
        ("a.jsonl.gz", b"\x1f\x8b", r"a\.jsonl\.gz, row 1: the file is damaged"),
        ("a.parquet", b"PAR1 and nothing", r"a\.parquet, row 1: the file is damaged"),
        ("a.csv", b'text\n"cut o', r"a\.csv, row 1: the file is damaged"),
        ("a.csv", b"text,text\na,b", r"a\.csv, row 1: two fields are named 'text'"),
        ("a.csv", b"text\na\nb,c", r"a\.csv, row 2: 2 cells, but the header names 1 column"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}', r"a\.jsonl, row 2: two fields are named 'text'"),
        ("a.json", b'[{"text": "b", "text": "c"}]', r"a\.json, row 1: two fields are named 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}', r"a\.jsonl, row 2: text has half of a character"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / name)


def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: two fields are named 'text'"):
        read(tmp_path / "a.parquet")


def test_a_folder_is_read_file_by_file_in_the_order_of_the_paths(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_bytes(b"first\r\nof all")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    (tmp_path / "notes.md").write_text("not a text")
    found = [(text.name, text.text) for text in texts(str(tmp_path), ("*.txt", "*.jsonl"), "text")]
    assert found == [("a.txt", "first\nof all"), ("b.txt", "second"), ("c.jsonl:1", "third"), ("c.jsonl:2", "fourth")]

"""Texts from files as they lie about: .txt, .jsonl, .csv and .parquet, one by one or a folder of them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Text:
    """One text, and where it came from: `file.txt`, or `file.jsonl:3` for the third line or row of a file."""

    name: str
    text: str


def texts(data_dir: str, files: Sequence[str], field: str) -> Iterator[Text]:
    """All texts of a file, or of the files of a folder that match one of the patterns `files`, in order of their paths.

    field: where a row of .jsonl, .csv and .parquet files has its text. Raises ValueError with one sentence where there
    is nothing, naming file and line where it is damaged.
    """
    for path, name in found(data_dir, files, (".txt", *TABLES)):
        for text in _texts_of(path, name, field):
            if not text.text.strip():
                raise ValueError(f"{text.name} has no text but white space, take it out of data_dir={data_dir}")
            yield text


def found(data_dir: str, files: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """A file and its name, or those of a folder that match one of the patterns `files`, in order of their paths.

    Raises ValueError with one sentence where there is none, and for one whose suffix is none of `kinds`.
    """
    path = Path(expanduser(data_dir))
    paths = [path]
    if path.is_dir():
        paths = sorted({p for pattern in files for p in path.glob(pattern) if p.is_file()})
        if not paths:
            raise ConfigError("data_dir", data_dir, why=f"holds no text, it must have files such as {', '.join(files)}")
    elif not path.is_file():
        what = "is neither folder nor file" if path.exists() else "does not exist"
        raise ConfigError(
            "data_dir", data_dir, why=f"{what}, it must be a folder of texts or one {_listed(kinds)} file"
        )
    for one in paths:
        if one.suffix not in kinds:
            raise ValueError(f"{one} is not a text file that is read here, it must be a {_listed(kinds)} file")
        yield one, str(one.relative_to(path)) if path.is_dir() else one.name


def rows(path: Path, name: str, fields: Sequence[str]) -> Iterator[Row]:
    """The rows of a .jsonl, .csv or .parquet file, each with a text in all of `fields`.

    Raises ValueError, naming file and line, where one lacks a field or the file is damaged.
    """
    for number, row in enumerate(_READERS[path.suffix](path, name), start=1):
        check_texts(row, fields, f"{name}, row {number}")
        yield row


def check_texts(row: Row, fields: Sequence[str], where: str) -> None:
    """Raise ValueError, naming where it is, for a row without a text in one of `fields`."""
    for field in fields:
        if not isinstance(row.get(field), str):
            has = ", ".join(str(key) for key in row if key is not None)
            got = f" but {row[field]!r:.40}" if row.get(field) is not None else ""
            raise ValueError(f"{where}: no text{got} in its field {field!r}, its fields are {has or 'none'}")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {field} holds half a surrogate pair, which is no letter") from error


def _texts_of(path: Path, name: str, field: str) -> Iterator[Text]:
    if path.suffix == ".txt":
        yield Text(name, "".join(_lines(path, name)))
    else:
        for number, row in enumerate(rows(path, name, (field,)), start=1):
            yield Text(f"{name}:{number}", row[field])


def _lines(path: Path, name: str, newline: str | None = None) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror or error})") from error


def _jsonl(path: Path, name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(path, name, newline="\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: not JSON, the file is damaged or cut off ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: not a JSON object")
        yield row


def _csv(path: Path, name: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a chapter is longer than what csv takes for a field
    reader = csv.DictReader(_lines(path, name, newline=""), strict=True)
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(
            f"{name}, line {reader.line_num}: not CSV, the file is damaged or cut off ({error})"
        ) from error


def _parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow.parquet  # here: half a second that only these files have to wait for

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=8):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} is damaged or not a parquet file: {str(error).splitlines()[0]}") from error


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
TABLES = tuple(_READERS)
"""Suffixes of files with rows."""


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds[:-1]) + " or " + kinds[-1]

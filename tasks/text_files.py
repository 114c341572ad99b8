"""Texts and rows from .txt, .jsonl, .json, .csv and .parquet files, one by one or a folder of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, UsageError, counted, first_line
from kvbench.tasks.task import check_references

Row = Mapping[str, Any]
_DAMAGED = (
    *(ValueError, OSError, EOFError, LookupError, RecursionError),
    *(csv.Error, zipfile.BadZipFile, zlib.error),
)
_WHOLE = re.compile(r"-?\d+\.0")
_SURROGATE = re.compile("[\ud800-\udfff]")
TABLES = (".jsonl", ".csv", ".parquet")
"""Suffixes of files with rows."""


@dataclass(frozen=True)
class Text:
    """One text and its source: `file.txt`, or `file.jsonl:3` for the third line or row of a file."""

    name: str
    text: str


def texts(data_dir: str, files: Sequence[str], field: str) -> Iterator[Text]:
    """All texts of a file, or of the files of a folder that match one of the patterns `files`, in order of their paths.

    field: the column with the text in .jsonl, .csv and .parquet files. Raises ValueError if there is no text, naming
    file and row if the file is damaged.
    """
    for path, name in found(data_dir, files, (".txt", *TABLES)):
        whole = path.suffix == ".txt"
        for number, row in enumerate(rows(path, name, ("text" if whole else field,)), start=1):
            text = Text(name, row["text"]) if whole else Text(f"{name}:{number}", row[field])
            if not text.text.strip():
                raise ValueError(f"{text.name} contains only white space, remove it from data_dir={data_dir}")
            yield text


def found(data_dir: str, files: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """A file and its name, or the files of a folder that match one of the patterns `files`, ordered by path.

    Raises ValueError if there is none, or for a suffix that is not in `kinds`.
    """
    path = Path(expanduser(data_dir))
    paths = [path]
    if path.is_dir():
        paths = sorted({p for pattern in files for p in path.glob(pattern) if p.is_file()})
        if not paths:
            raise ConfigError(
                "data_dir", data_dir, why=f"contains no text, it must have files such as {', '.join(files)}"
            )
    elif not path.is_file():
        what = "is neither folder nor file" if path.exists() else "does not exist"
        raise ConfigError(
            "data_dir", data_dir, why=f"{what}, it must be a folder of texts or one {_listed(kinds)} file"
        )
    for one in paths:
        if one.suffix not in kinds:
            raise ValueError(f"{one} is not a supported text file, it must be a {_listed(kinds)} file")
        yield one, str(one.relative_to(path)) if path.is_dir() else one.name


def rows(
    path: Path, name: str, fields: Sequence[str], lists: Sequence[str] = (), member: str = "test.jsonl"
) -> Iterator[Row]:
    """The rows of a file, with a string in each of `fields` and a list of strings in each of `lists`.

    .csv and .parquet are tables; .txt is a single row; .json is a list, or has one row per line like all other files.
    A column of a .csv file in which every number ends in `.0` has whole numbers: pandas writes gaps so.
    `.gz` after the suffix is unpacked; a .zip file is read at `member`. Raises ValueError, naming file and row, if a
    row does not have a field, the file is damaged, or it has no row.
    """
    number = 0
    for number, row in enumerate(_read(path, name, member), start=1):
        check_row(row, fields, lists, f"{name}, row {number}")
        yield row
    if not number:
        raise ValueError(f"{name} contains no rows")


def _read(path: Path, name: str, member: str) -> Iterator[Any]:
    kind = Path(member if path.suffix == ".zip" else path.stem if path.suffix == ".gz" else path).suffix
    number = 0
    try:
        for row in _READERS.get(kind, _jsonl)(path, member):
            number += 1
            yield row
    except UsageError as error:
        raise ValueError(f"{name}, row {number + 1}: {error}") from error
    except _DAMAGED as e:
        why = f"the file is damaged or truncated ({first_line(e)})"
        raise ValueError(f"{name}, row {number + 1}: {why}") from e


def check_row(row: Any, fields: Sequence[str], lists: Sequence[str], where: str) -> None:  # noqa: ANN401 - it is checked
    """Raise ValueError, naming the place, for a row without its texts or lists of texts, none of them empty."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    has = ", ".join(str(key) for key in row if key is not None)
    for field in fields:
        if not isinstance(row.get(field), str):
            got = f" but {row[field]!r:.40}" if row.get(field) is not None else ""
            raise ValueError(f"{where}: no text{got} in its field {field!r}, its fields are {has or 'none'}")
    for field in lists:
        value = row.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ValueError(f"{where}: {field} is {value!r:.60}, it must be a list of texts that is not empty")
        check_references(value, f"{where}: {field}")
    for field in (*fields, *lists):
        for text in [row[field]] if field in fields else row[field]:
            if _SURROGATE.search(text):
                raise ValueError(f"{where}: {field} has half of a character (a lone surrogate), so it is no text")


def _text(path: Path, member: str, newline: str | None = None) -> io.TextIOWrapper:
    """A file as UTF-8 text, with or without a byte order mark."""
    return io.TextIOWrapper(_opened(path, member), encoding="utf-8-sig", newline=newline)


def _opened(path: Path, member: str) -> Any:  # noqa: ANN401 - a stream of bytes
    """A file as bytes; for a .zip file, the first entry with a path that ends in `member`."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix != ".zip":
        return path.open("rb")
    archive = zipfile.ZipFile(path)
    inside = [name for name in archive.namelist() if f"/{name}".endswith(f"/{member}")]
    return archive.open(inside[0] if inside else member)


def _txt(path: Path, member: str) -> Iterator[Row]:
    with _text(path, member) as stream:
        yield {"text": stream.read()}


def _jsonl(path: Path, member: str) -> Iterator[Any]:
    with _text(path, member, newline="\n") as stream:
        yield from (json.loads(line, object_pairs_hook=_row) for line in stream if line.strip())


def _json(path: Path, member: str) -> Iterator[Any]:
    with _text(path, member) as stream:
        text = stream.read()
    yield from json.loads(text, object_pairs_hook=_row) if text.lstrip().startswith("[") else _jsonl(path, member)


def _row(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a row or an object. UsageError for two of one name, of which one would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise UsageError(f"two fields are named {next(name for name in names if names.count(name) > 1)!r}")
    return row


def _csv(path: Path, member: str) -> Iterator[Row]:
    """The rows of a .csv file; columns of whole numbers without the `.0` that pandas adds where one is missing."""
    whole: dict[str, bool] = {}
    with suppress(*_DAMAGED):  # the second time the file is read, its row is named
        for row in _cells(path, member):
            for name, cell in row.items():
                if cell:
                    whole[name] = whole.get(name, True) and _WHOLE.fullmatch(cell) is not None
    for row in _cells(path, member):
        yield {name: cell.removesuffix(".0") if whole.get(name) else cell for name, cell in row.items()}


def _cells(path: Path, member: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)  # a chapter exceeds the default limit of csv
    with _text(path, member, newline="") as stream:
        reader = csv.reader(stream, strict=True)
        names = next(reader, [])
        _row([(name, None) for name in names])
        for row in filter(None, reader):
            if len(row) > len(names):
                raise UsageError(f"{counted(len(row), 'cell')}, but the header names {counted(len(names), 'column')}")
            yield dict(zip(names, row, strict=False))


def _parquet(path: Path, _: str) -> Iterator[Row]:
    import pyarrow.parquet  # here: takes half a second to import

    with pyarrow.parquet.ParquetFile(path) as file:
        _row([(name, None) for name in file.schema_arrow.names])
        for batch in file.iter_batches(batch_size=8):
            yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".txt": _txt,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds[:-1]) + " or " + kinds[-1]

"""Texts and rows from files as they lie about: .txt, .jsonl, .json, .csv, .parquet, one by one or a folder of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError

Row = Mapping[str, Any]
TABLES = (".jsonl", ".csv", ".parquet")
"""Suffixes of files with rows."""


@cache
def shipped(name: str) -> Any:  # noqa: ANN401 - JSON
    """What a file of `tasks/data` holds; texts of benchmarks name their source and licence there."""
    return json.loads(resources("kvbench.tasks").joinpath(f"data/{name}").read_text(encoding="utf-8"))


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


def rows(
    path: Path, name: str, fields: Sequence[str], lists: Sequence[str] = (), member: str = "test.jsonl"
) -> Iterator[Row]:
    """The rows of a file, each with a text in all of `fields` and a list of texts in all of `lists`.

    .csv and .parquet are tables, .json is a list or has a row a line, as any other file has. `.gz` behind the suffix is
    unpacked; of a .zip file the rows are those of `member`. Raises ValueError, naming file and line, where a row lacks
    a field, the file is damaged, or there is no row.
    """
    kind = Path(member if path.suffix == ".zip" else path.stem if path.suffix == ".gz" else path).suffix
    number = 0
    for number, row in enumerate(_READERS.get(kind, _lines_of_json)(path, name, member), start=1):
        check_row(row, fields, lists, f"{name}, row {number}")
        yield row
    if not number:
        raise ValueError(f"{name} holds no rows")


def check_row(row: Any, fields: Sequence[str], lists: Sequence[str], where: str) -> None:  # noqa: ANN401 - it is checked
    """Raise ValueError, naming where it is, for a row without its texts or lists of texts."""
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


def _texts_of(path: Path, name: str, field: str) -> Iterator[Text]:
    if path.suffix == ".txt":
        yield Text(name, "".join(_lines(path, name)))
    else:
        for number, row in enumerate(rows(path, name, (field,)), start=1):
            yield Text(f"{name}:{number}", row[field])


def _lines(path: Path, name: str, member: str = "", newline: str | None = None) -> Iterator[str]:
    try:
        with _opened(path, member) as stream:
            yield from io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, LookupError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{name} is damaged or cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error


def _opened(path: Path, member: str) -> Any:  # noqa: ANN401 - a stream of bytes
    """A file as bytes; of a .zip file the first member whose path ends in `member`."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix != ".zip":
        return path.open("rb")
    archive = zipfile.ZipFile(path)
    inside = [name for name in archive.namelist() if f"/{name}".endswith(f"/{member}")]
    return archive.open(inside[0] if inside else member)


def _lines_of_json(path: Path, name: str, member: str) -> Iterator[Any]:
    for number, line in enumerate(_lines(path, name, member, newline="\n"), start=1):
        if line.strip():
            yield _parsed(line, f"{name}, line {number}")


def _json(path: Path, name: str, member: str) -> Iterator[Any]:
    text = "".join(_lines(path, name, member, newline="\n"))
    return iter(_parsed(text, name)) if text.lstrip().startswith("[") else _lines_of_json(path, name, member)


def _parsed(text: str, where: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON, the file is damaged or cut off ({error})") from error


def _csv(path: Path, name: str, member: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a chapter is longer than what csv takes for a field
    reader = csv.DictReader(_lines(path, name, member, newline=""), strict=True)
    try:
        yield from reader
    except csv.Error as error:
        where = f"{name}, line {reader.line_num}"
        raise ValueError(f"{where}: not CSV, the file is damaged or cut off ({error})") from error


def _parquet(path: Path, name: str, _: str) -> Iterator[Row]:
    import pyarrow.parquet  # here: half a second that only these files have to wait for

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=8):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} is damaged or not a parquet file: {str(error).splitlines()[0]}") from error


_READERS: dict[str, Callable[[Path, str, str], Iterator[Any]]] = {".json": _json, ".csv": _csv, ".parquet": _parquet}


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds[:-1]) + " or " + kinds[-1]

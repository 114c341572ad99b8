"""LongBench's rows, from a local copy in the official layout or from the official archive on the hub."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks.hub import HubFile

MEMBER = "data/{name}.jsonl"


@dataclass(frozen=True)
class Row:
    """One row of a subset. length: words of the context, characters for Chinese. all_classes: for trec and lsht."""

    context: str
    input: str
    answers: tuple[str, ...]
    length: int
    all_classes: tuple[str, ...] | None
    id: str


def rows(name: str, data_dir: str | None, archive: HubFile | None) -> list[Row]:
    """All rows of a subset ("qasper", or "qasper_e" for LongBench-E), from `data_dir` or else from the hub's archive.

    data_dir: holds `<name>.jsonl`, or `data/<name>.jsonl`, or the archive data.zip.
    Raises ValueError with one sentence where the data cannot be had, or naming file and line where it is damaged.
    """
    if data_dir is None:
        if archive is None:
            raise ConfigError(
                "data_dir", None, why="is not allowed without an archive, LongBench's rows must come from somewhere"
            )
        path = archive.fetch(f"download it elsewhere, unpack it, and give data_dir=<folder with {name}.jsonl>")
        return _from_archive(path, name)
    folder = Path(expanduser(data_dir))
    for path in (folder / f"{name}.jsonl", folder / MEMBER.format(name=name)):
        if path.is_file():
            return list(_parse(path.read_bytes(), str(path)))
    if (folder / "data.zip").is_file():
        return _from_archive(folder / "data.zip", name)
    source = archive.url if archive is not None else "LongBench's data.zip"
    raise ConfigError(
        "data_dir",
        data_dir,
        why=f"has neither {name}.jsonl nor data.zip: download {source} and put it there, unpacked or as it is",
    )


def _from_archive(path: Path, name: str) -> list[Row]:
    member = MEMBER.format(name=name)
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.read(member)  # checks its CRC
    except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
        raise ValueError(f"{path} is damaged or not LongBench's data.zip, {member} cannot be read: {error}") from error
    return list(_parse(content, f"{path}:{member}"))


def _parse(content: bytes, where: str) -> Iterator[Row]:
    lines = content.split(b"\n")
    if not content.strip():
        raise ValueError(f"{where} is empty, LongBench's files have one JSON object per line")
    for number, line in enumerate(lines, start=1):
        if line.strip() or number < len(lines):
            yield _row(line, f"{where}, line {number}")


def _row(line: bytes, where: str) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON object, the file is damaged or cut off ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: not a JSON object")
    return Row(
        context=_field(values, "context", str, where),
        input=_field(values, "input", str, where),
        answers=_texts(values, "answers", where),
        length=_field(values, "length", int, where),
        all_classes=_texts(values, "all_classes", where) if values.get("all_classes") else None,
        id=str(values.get("_id", "")),
    )


def _field(values: dict[str, Any], name: str, kind: type, where: str) -> Any:  # noqa: ANN401 - it is what is checked
    value = values.get(name)
    if not isinstance(value, kind):
        raise ValueError(
            f"{where}: {name} is {value!r:.60}, LongBench has {'text' if kind is str else 'a number'} there"
        )
    return value


def _texts(values: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = values.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: {name} is {value!r:.60}, LongBench has a list of texts there")
    return tuple(value)

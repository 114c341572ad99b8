"""Rows with a context, a question and its answers: of local files, or of a data set on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks import text_files

ASKED = ("context", "question")
ANSWERS = ("answers", "answer")


@dataclass(frozen=True)
class Row:
    """One question. answers: at least one text. max_new_tokens: None where the file does not say. name: where it is.

    values: the row as it is.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int | None
    task: str | None
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)


def from_files(data_dir: str, files: Sequence[str]) -> Iterator[Row]:
    """The rows of a file, or of the files of a folder that match one of the patterns, in order of their paths.

    Raises ValueError with one sentence where there is none, naming file and row where one cannot be used.
    """
    for path, name in text_files.found(data_dir, files, text_files.TABLES):
        for number, values in enumerate(text_files.rows(path, name, ASKED), start=1):
            yield _row(values, f"{name}, row {number}")


def from_hub(hub: str, subset: str | None, split: str, revision: str | None, named: str = "hub") -> Iterator[Row]:
    """The rows of a data set on the hub. ValueError, beginning with `named`, where it cannot be had."""
    import datasets  # here: a second that only these rows have to wait for

    name = "/".join([hub, *([subset] if subset else []), split])
    try:
        loaded = datasets.load_dataset(hub, subset, split=split, revision=revision)
    except (OSError, ValueError, KeyError) as error:  # no network, no such name, no such subset or split
        said = " ".join(str(error).split())
        raise ConfigError(
            named,
            hub,
            why=f"cannot be read ({type(error).__name__}: {said:.120}): check hub, subset and split, or "
            "download it elsewhere and give data_dir=<its files>",
        ) from error
    for number, values in enumerate(loaded, start=1):
        text_files.check_texts(values, ASKED, f"{name}, row {number}")
        yield _row(values, f"{name}, row {number}")


def _row(values: Mapping[str, Any], where: str) -> Row:
    most = values.get("max_new_tokens")
    return Row(
        context=values["context"],
        question=values["question"],
        answer_prefix=_text(values, "answer_prefix", where) or "",
        answers=_answers(values, where),
        max_new_tokens=None if most in (None, "") else _number(most, where),
        task=_text(values, "task", where),
        name=where,
        values=values,
    )


def _answers(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A text, or a list of them: as such, or as JSON, where a file holds texts only (.csv)."""
    name = next((name for name in ANSWERS if values.get(name) is not None), None)
    if name is None:
        raise ValueError(f"{where}: neither answers nor answer, its fields are {', '.join(map(str, values))}")
    found = values[name]
    if isinstance(found, str):
        return _texts(_from_json(found)) or (found,)
    texts = _texts(found)
    if texts is None:
        raise ValueError(f"{where}: {name} is {found!r:.60}, it must be a text or a list of texts that is not empty")
    return texts


def _texts(value: object) -> tuple[str, ...] | None:
    """A list of texts that is not empty; None for anything else."""
    listed = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
    return tuple(value) if isinstance(value, list) and listed else None


def _from_json(text: str) -> object:
    """What a text says as JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _text(values: Mapping[str, Any], name: str, where: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {name} is {value!r:.60}, it must be a text")
    return value


def _number(value: object, where: str) -> int:
    whole = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
        raise ValueError(f"{where}: max_new_tokens is {value!r:.60}, it must be an integer of at least 1")
    return whole

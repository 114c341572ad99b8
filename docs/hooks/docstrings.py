"""What a part says of itself: idea, equation, source and fields, read from its docstring and its dataclass.

A docstring of ours is: one sentence; equations, indented; prose in which `field: what it is.` describes the fields; and
at the end `Source: ...`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from equations import blocks, typeset
from md import prose

WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Field:
    """One knob. default: as YAML would have it; meaning: Markdown, "" where the docstring does not say."""

    name: str
    allowed: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Described:
    """A part, ready for a page: idea and prose are Markdown, equations HTML ("" where there are none)."""

    name: str
    idea: str
    equations: str
    prose: str
    source: str
    fields: tuple[Field, ...]


def describe(part: Any) -> Described:  # noqa: ANN401 - a class
    """What the docstring and the fields of a class say."""
    idea, equations, prose, source, meanings = _read(part)
    for base in part.__mro__[1:]:
        if dataclasses.is_dataclass(base) and base.__doc__:
            meanings = {**_read(base)[-1], **meanings}
    hints = get_type_hints(part)
    rows = [
        Field(f.name, _allowed(hints[f.name]), _default(f), meanings.get(f.name, ""))
        for f in dataclasses.fields(part)
        if f.init
    ]
    return Described(part.__name__, idea, equations, prose, source, tuple(rows))


def _read(part: Any) -> tuple[str, str, str, str, dict[str, str]]:  # noqa: ANN401
    """(idea, equations, prose, source, meaning of each field) of one class's own docstring."""
    text, _, source = inspect.cleandoc(part.__doc__ or "").partition("Source: ")
    names = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    equations, texts, meanings = "", [], dict[str, str]()
    for paragraph, indented in blocks(text):
        if indented:
            equations += typeset(paragraph)
        else:
            left, found = _take_fields(" ".join(paragraph.split()), names)
            meanings |= found
            texts.append(left)
    idea, *rest = texts
    return prose(idea), equations, prose("\n\n".join(filter(None, rest))), prose(" ".join(source.split())), meanings


def _take_fields(text: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """The text before its first `field: meaning`, and the meanings by field; the last one ends with the text."""
    if not names:
        return text, {}
    text, _, raises = text.partition(" Raises ")
    name = f"(?:{'|'.join(map(re.escape, names))})"
    marks = list(re.finditer(rf"(?:^|(?<=\. ))({name}(?:, {name})*)(?: \([^)]*\))?: ", text))
    rest = f"Raises {raises}" if raises else ""
    if not marks:
        return f"{text} {rest}".strip(), {}
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    meanings = {
        one: prose(text[mark.end() : end].strip().removesuffix("."))
        for mark, end in zip(marks, ends, strict=True)
        for one in mark.group(1).split(", ")
    }
    return f"{text[: marks[0].start()]} {rest}".strip(), meanings


def _allowed(hint: Any) -> str:  # noqa: ANN401
    """The values of a field in words: `sum`, `softmax`; whole number or null; a part."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (tuple, Sequence):
        return f"list of {_allowed(get_args(hint)[0])}s"
    if hint in WORDS:
        return WORDS[hint]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_allowed(one) for one in get_args(hint))
    return "a part"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return yaml_value(field.default)
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return type(made).__name__ if dataclasses.is_dataclass(made) else yaml_value(made)
    return ""


def yaml_value(value: object) -> str:
    """A plain value as it is typed in YAML or on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, Mapping):
        return str(value.get("_target_", value)).rpartition(".")[2]
    text = str(value) or "''"
    return json.dumps(text, ensure_ascii=False) if "\n" in text else text

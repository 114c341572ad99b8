"""Predictions of other tools, one JSON object per line, and checks of their fields.

A module that scores predictions defines:

    FIELDS: str                        the fields of a line, for --help
    FLAGS: Mapping[str, str]           boolean options with their help; optional
    JUDGES: Sequence[str]              the values of `protocol`, the default first; optional
    score_predictions(line, **flags)   the fields to add to a line, with `score`. Raises ValueError, naming the field,
                                       if the line has another format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvbench.tasks.task import check_references, is_blank

Line = dict[str, Any]
"""One prediction, or the predictions of a whole task: a JSON object."""

Rule = Callable[[str, Any], float]
"""The score of a prediction and its references in the benchmark's format: a list, a text or a number."""

JUDGES = ("authors", "kvpress")
"""The scorers of the benchmark's authors, or of kvpress, which has some of the benchmarks."""

RAISED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that official scorers raise on unusual outputs."""


def official(score: Callable[[], object]) -> Line:
    """`score`, or null and the message as `error` if the official scorer raises an error."""
    try:
        return {"score": score()}
    except RAISED as error:
        return {"score": None, "error": raised(error)}


def judged(rule: Rule, sound: Rule | None, output: str, wanted: Any) -> tuple[float, Line]:  # noqa: ANN401
    """The score of an official rule, 0 if it raises an error; with the corrected score of a broken one as measures."""
    try:
        score = rule(output, wanted)
    except RAISED:
        score = 0.0
    return score, {} if sound is None else {"score": score, "score_sound": sound(output, wanted)}


def corrected(rule: Rule, output: str, wanted: Any, name: str, task: str) -> Line:  # noqa: ANN401
    """`score_sound` by a corrected rule. ValueError for references, in the field `name`, of another format."""
    try:
        return {"score_sound": rule(output, wanted)}
    except RAISED as error:
        raise ValueError(f"{name}={wanted!r:.60} does not have the format of {task} ({error})") from error


def raised(error: Exception) -> str:
    """The reason for a missing official number."""
    return f"the official scorer raises {type(error).__name__}: {error}"


def references(line: Line, name: str = "references") -> Any:  # noqa: ANN401 - texts, numbers, or one of them
    """The value of a required field: not empty, and without empty texts."""
    value = line.get(name)
    if value is None or value == [] or not _is_full(value):
        raise ValueError(
            f"{name} must be a text, a number or a list of them, and no text may be empty, it is {_shown(line, name)}"
        )
    return value


def _is_full(value: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether no text in nested lists is empty."""
    return all(map(_is_full, value)) if isinstance(value, list) else not isinstance(value, str) or not is_blank(value)


def one_of(line: Line, name: str, allowed: Sequence[str]) -> str:
    """A string among the allowed values."""
    value = text(line, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known, choose one of {', '.join(allowed)}")
    return value


def text(line: Line, name: str) -> str:
    """A text."""
    value = line.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, it is {_shown(line, name)}")
    return value


def texts(line: Line, name: str) -> list[str]:
    """A list of at least one text."""
    value = line.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name} must be a list of at least one text, it is {_shown(line, name)}")
    return value


def wanted_texts(line: Line, name: str) -> list[str]:
    """The texts that a prediction is compared with: at least one, none of them empty."""
    found = texts(line, name)
    check_references(found, name)
    return found


def nested(line: Line, name: str, count: int) -> list[list[str]]:
    """The `wanted_texts` of each of `count` predictions."""
    value = line.get(name)
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{name} must have a list for each of the {count} predictions, it is {_shown(line, name)}")
    return [wanted_texts({name: one}, name) for one in value]


def numbers(line: Line, name: str, count: int) -> list[int]:
    """A whole number for each of `count` predictions."""
    value = line.get(name)
    if not isinstance(value, list) or len(value) != count or not all(isinstance(number, int) for number in value):
        raise ValueError(f"{name} must have a number for each of the {count} predictions, it is {_shown(line, name)}")
    return value


def _shown(line: Line, name: str) -> str:
    if name not in line:
        return "missing"
    value = json.dumps(line[name], ensure_ascii=False)
    return value if len(value) <= 60 else f"{value[:57]}..."

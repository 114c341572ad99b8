"""User errors with one-line messages, and checks of fields. Every folder may import this module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import inf
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

LARGEST = 2**53
"""The largest whole number that JSON and Parquet readers represent exactly."""
FEW, MANY = 10, 30
"""A message lists up to FEW allowed names after the nearest ones, and up to MANY if no name is near."""
LISTS = {"policy": "policies", "task": "tasks", "model": "models", "table": "tables list"}
"""Groups, and the commands that list their names."""
_WORD = re.compile(r"([A-Za-z_/.~][\w/.~:@+-]*)?")
_TYPED = {"None": "null", "True": "true", "False": "false"}


CHANGED = "its model or a file that it reads has changed since the sweep started; run its command again"
"""The end of the message of a run whose identity is no longer that of its files."""


class UsageError(ValueError):
    """A mistake of the user. Commands print its message without a traceback and exit with code 2."""


class ConfigError(UsageError):
    """A wrong value of a field.

    field: name of the field in its part; `at` adds the path of the part. allowed: the allowed values; or why: the
    reason why the value is wrong.
    """

    def __init__(self, field: str, value: object, allowed: str = "", why: str = "") -> None:
        self.field, self.value, self.allowed, self.why = field, value, allowed, why
        value = str(value) if isinstance(value, PurePath) else value
        got = a_kind(value) if isinstance(value, type) else _TYPED.get(repr(value), repr(value))
        written = value if isinstance(value, str) and _WORD.fullmatch(value) else got  # as on the command line
        reason = f"{field}={written}{' ' * (why[:1] not in ':,')}{why}"
        super().__init__(reason if why else f"{field} must be {allowed}, got {got}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        """For pickle, between processes."""
        return type(self), (self.field, self.value, self.allowed, self.why)

    def at(self, *place: str) -> ConfigError:
        """The same error with a longer field name: `policy.scorer.window`."""
        return ConfigError(".".join((*place, self.field)), self.value, self.allowed, self.why)


def a_kind(of: type) -> str:
    """`an int`: a type, for messages."""
    return f"{'an' if of.__name__[0] in 'aeiouAEIOU' else 'a'} {of.__name__}"


def unknown(field: str, name: str, allowed: Sequence[str], more: str = "") -> UsageError:
    """The error for a name that does not exist, with the nearest names first. more: other allowed names, in words."""
    return UsageError(f"{field}={name} does not exist{instead(name, allowed, more, LISTS.get(field, '--help'))}")


def hub(group: str, name: str) -> str:
    """For `unknown`: how to name a model of the Hugging Face Hub, if a name looks like one."""
    is_hub = group == "model" and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    return f"; a model of the Hub: model=hub model.hub_id={name}" if is_hub else ""


def instead(name: str, allowed: Sequence[str], more: str = "", command: str = "", noun: str = "name") -> str:
    """The end of a message about a wrong name: the nearest names, and all, unless they are many.

    command: the arguments of `kvbench` that list all names. noun: what the names are.
    """
    near = get_close_matches(name, allowed, n=3, cutoff=0.6)
    guess = f": did you mean {' or '.join(', '.join(near).rsplit(', ', 1))}?" if near else ""
    if len(allowed) <= (FEW if near else MANY):
        return f"{guess} (allowed: {', '.join(allowed) or 'none'}{more})"
    listed = f"; `kvbench {command}` lists them" if command else ""
    return f"{guess} ({counted(len(allowed), noun)} exist{listed}{more})"


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check of the user's input into a UsageError, with `prefix` before its message."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UsageError) and not isinstance(error, ConfigError):
            raise
        raise UsageError(f"{prefix}{error}") from error


@contextmanager
def from_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn an import of a package that is not installed into an error with `pip install 'kvbench[extra]'`.

    purpose: what the package is needed for, as the subject of the message. Raises UsageError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "kvbench":
            raise
        message = f"{purpose} needs {package}, which is not installed: pip install 'kvbench[{extra}]'"
        raise UsageError(message) from error


def choice(name: str, value: object, *allowed: object) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    if value not in allowed:
        words = " or ".join(", ".join(map(str, allowed)).rsplit(", ", 1))
        raise ConfigError(name, value, words)


def whole_number(name: str, value: object, least: float, most: int = LARGEST) -> None:
    """Raise ConfigError unless the value is a whole number from `least` to `most`; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"a whole number of at least {least}")
    if value > most:
        raise ConfigError(name, value, f"at most {most}")


def as_python(value: Any) -> Any:  # noqa: ANN401 - any value of a field
    """Numbers of other packages, such as NumPy's, as int or float; other values, and those in lists, likewise."""
    if isinstance(value, list | tuple):
        return type(value)(map(as_python, value))
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, int | float) else value


def number(name: str, value: object, low: float, high: float = inf, *, below: float = inf) -> None:
    """Raise ConfigError unless the value is a finite number from `low` to `high` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and value < below):
        span = f"from {low:g} to {high:g}" if high < inf else f"of at least {low:g}"
        span += f" and below {below:g}" if below < inf else ""
        raise ConfigError(name, value, f"a number {span}")


def counted(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else 'no message'}"

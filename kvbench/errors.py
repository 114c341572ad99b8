"""What a user can mend: errors that are one sentence, and checks of fields. Every room may import this module."""

from __future__ import annotations

import re
from math import inf
from pathlib import PurePath

LARGEST = 2**53
"""The largest whole number that JSON and Parquet readers represent exactly."""
_WORD = re.compile(r"([A-Za-z_/.~][\w/.~:@+-]*)?")
_TYPED = {"None": "null", "True": "true", "False": "false"}


class UsageError(ValueError):
    """What was asked for cannot be done: shown as one sentence, without a traceback, exit code 2."""


class ConfigError(UsageError):
    """A wrong value of a field.

    field: as its part calls it; `at` says where the part stands. allowed: what the value must be, or else why: what
    is wrong with it.
    """

    def __init__(self, field: str, value: object, allowed: str = "", why: str = "") -> None:
        self.field, self.value, self.allowed, self.why = field, value, allowed, why
        value = str(value) if isinstance(value, PurePath) else value
        got = f"a {value.__name__}" if isinstance(value, type) else _TYPED.get(repr(value), repr(value))
        written = value if isinstance(value, str) and _WORD.fullmatch(value) else got  # as on the command line
        said = f"{field}={written}{' ' * (why[:1] not in ':,')}{why}"
        super().__init__(said if why else f"{field} must be {allowed}, got {got}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        """As processes hand it on."""
        return type(self), (self.field, self.value, self.allowed, self.why)

    def at(self, *place: str) -> ConfigError:
        """The same error with its field named from further up: `policy.scorer.window`."""
        return ConfigError(".".join((*place, self.field)), self.value, self.allowed, self.why)


def choice(name: str, value: object, *allowed: object) -> None:
    """ConfigError unless a field is one of the values it may be."""
    if value not in allowed:
        words = " or ".join(", ".join(map(str, allowed)).rsplit(", ", 1))
        raise ConfigError(name, value, words)


def whole_number(name: str, value: object, least: float, most: int = LARGEST) -> None:
    """ConfigError unless a field is a whole number of at least `least` and at most `most`; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"a whole number of at least {least}")
    if value > most:
        raise ConfigError(name, value, f"at most {most}")


def number(name: str, value: object, low: float, high: float = inf, *, below: float = inf) -> None:
    """ConfigError unless a field is a finite number of at least `low`, at most `high` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and value < below):
        span = f"from {low:g} to {high:g}" if high < inf else f"of at least {low:g}"
        span += f" and below {below:g}" if below < inf else ""
        raise ConfigError(name, value, f"a number {span}")

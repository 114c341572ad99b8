"""Checks of a part's fields: a ConfigError of one sentence that names the field, what is allowed and the value."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import inf
from typing import Literal, get_args, get_origin, get_type_hints

from kvbench.errors import ConfigError

LARGEST = 2**53
"""The largest whole number that JSON and Parquet readers represent exactly."""


def choice(name: str, value: object, *allowed: object) -> None:
    """ConfigError unless a field is one of the values it may be."""
    if value not in allowed:
        words = " or ".join(", ".join(map(str, allowed)).rsplit(", ", 1))
        raise ConfigError(name, value, words)


def check_choices(part: Hashable) -> None:
    """ConfigError unless every field that is declared as a `Literal` has one of its values."""
    for name, allowed in _choices(type(part)).items():
        choice(name, getattr(part, name), *allowed)


@lru_cache
def _choices(kind: Hashable) -> dict[str, tuple[object, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def whole_number(name: str, value: object, least: float, most: int = LARGEST) -> None:
    """ConfigError unless a field is a whole number of at least `least` and at most `most`; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"a whole number of at least {least}")
    if value > most:
        raise ConfigError(name, value, f"at most {most}")


def count_or(word: str, name: str, value: object, least: int) -> None:
    """ConfigError unless a field is `word` or a number of tokens of at least `least`; true is no number."""
    if value != word and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST):
        raise ConfigError(name, value, f"{word!r} or a number of tokens >= {least}")


def whole_numbers(name: str, values: object, least: float = -inf) -> None:
    """ConfigError unless a field is a list of whole numbers of at least `least`."""
    if not isinstance(values, list | tuple):
        raise ConfigError(name, values, "a list of whole numbers")
    for value in values:
        whole_number(name, value, least)


def layers_exist(name: str, given: Sequence[int], layers: int) -> None:
    """ConfigError where a field names a layer, from 0 or (negative) from the end, that a model does not have."""
    for layer in given:
        if not -layers <= layer < layers:
            raise ConfigError(name, layer, why=f"is not allowed, the model has layers 0 to {layers - 1}")


def number(name: str, value: object, low: float, high: float = inf, *, below: float = inf) -> None:
    """ConfigError unless a field is a finite number of at least `low`, at most `high` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and value < below):
        span = f"from {low:g} to {high:g}" if high < inf else f"of at least {low:g}"
        span += f" and below {below:g}" if below < inf else ""
        raise ConfigError(name, value, f"a number {span}")

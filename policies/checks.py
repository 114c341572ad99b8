"""What a part asks of its own fields: else a ConfigError with the field, its value and what it may be."""

from collections.abc import Sequence
from math import inf

from kvbench.errors import ConfigError

LARGEST = 2**53
"""The largest whole number that every reader of our files, JSON's and Parquet's, knows exactly."""


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

"""Checks of a part's fields. A ConfigError gives the field, its value and the allowed values; see `kvbench.errors`."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import inf
from typing import Literal, get_args, get_origin, get_type_hints

from kvbench.errors import LARGEST, ConfigError, choice, number, whole_number

__all__ = [
    "LARGEST",
    "check_choices",
    "choice",
    "count_or",
    "layers_exist",
    "number",
    "whole_number",
    "whole_numbers",
]


def check_choices(part: Hashable) -> None:
    """Raise ConfigError unless every field declared as a `Literal` has one of its values."""
    for name, allowed in _choices(type(part)).items():
        choice(name, getattr(part, name), *allowed)


@lru_cache
def _choices(kind: Hashable) -> dict[str, tuple[object, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def count_or(word: str, name: str, value: object, least: int) -> None:
    """Raise ConfigError unless a field is `word` or a number of tokens >= `least`; booleans are rejected."""
    if value != word and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST):
        raise ConfigError(name, value, f"{word!r} or a number of tokens >= {least}")


def calibrated_file(name: str, value: str, what: str, calibration: str) -> None:
    """ConfigError unless a field names a file, which `kvbench calibrate CALIBRATION` creates."""
    if not value:
        why = f"must name {what}; create one with `kvbench calibrate {calibration}`"
        raise ConfigError(name, value, why=why)


def whole_numbers(name: str, values: object, least: float = -inf) -> None:
    """Raise ConfigError unless a field is a list of whole numbers >= `least`."""
    if not isinstance(values, list | tuple):
        raise ConfigError(name, values, "a list of whole numbers")
    for value in values:
        whole_number(name, value, least)


def layers_exist(name: str, given: Sequence[int], layers: int) -> None:
    """Raise ConfigError if a field names a layer, from 0 or (negative) from the end, that the model does not have."""
    for layer in given:
        if not -layers <= layer < layers:
            raise ConfigError(name, layer, why=f"is not allowed: the model has attention layers 0 to {layers - 1}")

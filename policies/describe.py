"""A part as plain data, as identities, tables and saved caches name it."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def describe(part: object, without: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - whatever JSON holds
    """A part as plain data: its class with its module, and all fields that decide its outcome, defaults included."""
    if is_dataclass(part) and not isinstance(part, type):
        named = [f.name for f in fields(part) if f.name not in without and f.metadata.get("decides", True)]
        values = {name: describe(getattr(part, name)) for name in named}
        return {"class": f"{type(part).__module__}.{type(part).__qualname__}", **values}
    if isinstance(part, Mapping):
        return {str(key): describe(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [describe(item) for item in part]
    return part if isinstance(part, str | int | float | None) else str(part)

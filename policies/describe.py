"""Convert parts to plain data for run identities, tables and saved caches.

`field(metadata={"decides": ...})` defines how a field affects results: False: not at all; FILE: by the contents of the
named file; default: by its value.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

FILE = "file"


def describe(part: object, without: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - any JSON value
    """A part as plain data: its class with module and all fields that affect results, including defaults."""
    if is_dataclass(part) and not isinstance(part, type):
        how = {f.name: f.metadata.get("decides", True) for f in fields(part) if f.name not in without}
        own = {name: getattr(part, name) for name in how if how[name]}
        values = {name: _contents(value) if how[name] == FILE else describe(value) for name, value in own.items()}
        return {"class": f"{type(part).__module__}.{type(part).__qualname__}", **values}
    if isinstance(part, Mapping):
        return {str(key): describe(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [describe(item) for item in part]
    return part if isinstance(part, str | int | float | None) else str(part)


def _contents(path: str | None) -> str | None:
    """A file's identity: the first 16 digits of its sha256. Raises OSError."""
    return path and f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
